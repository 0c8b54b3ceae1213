"""Sampling: published random numbers, right frequencies, exact truncation, never a token without mass."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from croze.inference.protocol import SamplingParams
from croze.inference.sampler import inverse_cdf, philox, sample, truncate, uniforms
from croze.models.transformer import log_probs

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_gives_the_published_numbers(counter, key, wanted):
    found = philox(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(word[0]) for word in found) == wanted


def test_uniforms_are_uniform_and_never_0_or_1():
    keys = np.arange(20_000, dtype=np.uint64)
    for u in (uniforms(3, keys, np.zeros(20_000)), uniforms(3, np.full(20_000, 7), np.arange(20_000))):
        assert u.min() > 0.0
        assert u.max() < 1.0
        assert kstest(u, "uniform").pvalue > 1e-3
    assert len(np.unique(uniforms(3, keys, np.zeros(20_000)))) == 20_000


def test_uniforms_depend_on_every_bit_of_seed_key_and_position():
    base = uniforms(5, np.array([9]), np.array([2]))[0]
    others = [uniforms(5 ^ (1 << b), np.array([9]), np.array([2]))[0] for b in range(64)]
    others += [uniforms(5, np.array([9 ^ (1 << b)], np.uint64), np.array([2]))[0] for b in range(64)]
    others += [uniforms(5, np.array([9]), np.array([2 ^ (1 << b)]))[0] for b in range(32)]
    assert len({base, *others}) == 161


def draw(logits: torch.Tensor, draws: int, **params: object) -> np.ndarray:
    """Tokens of one distribution, each from a stream of its own."""
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    many = logits[None].expand(draws, -1)
    tokens, logprobs = sample(many, [settings] * draws, list(range(draws)), [0] * draws)
    temperature = settings.temperature or 1.0
    wanted = log_probs(many, torch.tensor(tokens), temperature)
    np.testing.assert_array_equal(np.float32(logprobs), wanted.numpy())  # of the whole distribution, always
    return np.array(tokens)


@pytest.mark.parametrize("vocab", [5, 256, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_are_the_probabilities(vocab, temperature):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    tokens = draw(logits, 8000, temperature=temperature, seed=1)
    wanted = torch.softmax(logits.double() / temperature, -1).numpy() * 8000
    common = wanted >= 5
    found = np.bincount(tokens, minlength=vocab)
    observed = np.r_[found[common], found[~common].sum()]
    expected = np.r_[wanted[common], wanted[~common].sum()]
    keep = expected > 0
    assert (
        chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue > 1e-3
    )


def test_temperature_0_takes_the_likeliest():
    logits = torch.randn(333, generator=torch.Generator().manual_seed(0))
    assert set(draw(logits, 20, temperature=0.0)) == {int(logits.argmax())}


def reference_truncation(p: list[float], top_p: float, top_k: int) -> set[int]:
    """The k likeliest, and of these the smallest set whose share of their mass reaches top_p."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = order[:top_k] if top_k else order
    total, mass, kept = math.fsum(p[i] for i in order), 0.0, []
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.append(i)
        mass = math.fsum(p[j] for j in kept)
    return {i for i in kept if p[i] > 0}


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.integers(0, 45),
)
def test_truncation_keeps_what_the_definition_keeps(logits, top_p, top_k):
    p = torch.softmax(torch.tensor(logits), -1)
    kept = truncate(p[None], top_p, top_k)[0]
    found = set(kept.nonzero()[:, 0].tolist())
    exact = [float(x) for x in p]
    assert found in [reference_truncation(exact, top_p + d, top_k) for d in (-1e-6, 0.0, 1e-6)]
    assert torch.equal(kept[kept > 0], p[kept > 0])


def test_truncated_draws_stay_inside_and_report_the_whole_distribution():
    logits = torch.randn(600, generator=torch.Generator().manual_seed(4)) * 3
    p = torch.softmax(logits, -1).tolist()
    for top_p, top_k in ((0.8, 0), (1.0, 5), (0.5, 20)):
        tokens = draw(logits, 500, top_p=top_p, top_k=top_k)
        assert set(tokens) <= reference_truncation(p, top_p, top_k)


NASTY = [0.0, 5e-324, 1e-12, 0.3, 1.0 - 1e-16, 1.0 - 2**-53, 1.0]


@settings(max_examples=80, deadline=None)
@example(vocab=900, filled=[(3, 1.0)], u=1.0)  # behind the last mass
@example(vocab=900, filled=[(899, 1e-38), (3, 1.0)], u=1.0)
@given(
    vocab=st.integers(1, 900),
    filled=st.lists(
        st.tuples(st.integers(0, 899), st.sampled_from([1e-38, 1e-20, 1e-7, 0.5, 1.0])), min_size=1
    ),
    u=st.one_of(st.sampled_from(NASTY), st.floats(0, 1)),
)
def test_a_token_without_mass_is_never_sampled(vocab, filled, u):
    p = torch.zeros(1, vocab)
    for token, mass in filled:
        p[0, token % vocab] = mass
    token = int(inverse_cdf(p, torch.tensor([u], dtype=torch.float64))[0])
    assert 0 <= token < vocab
    assert p[0, token] > 0


def test_rounding_at_the_border_of_a_block_finds_mass():
    """A block's end minus its sum may be a little more than the end before it; uniforms that fall between."""
    generator = torch.Generator().manual_seed(0)
    masses = torch.rand(60, 192, generator=generator) * 10 ** (-12 * torch.rand(60, 192, generator=generator))
    p = torch.zeros(60, 192 * 256)
    p[:, 5::256] = masses
    ends = masses.double().cumsum(-1)
    row, block = ((ends - masses.double())[:, 1:] > ends[:, :-1]).nonzero().unbind(1)
    assert len(row) > 50
    border, total = ends[row, block], ends[row, -1]
    near = border / total
    for u in (near, torch.nextafter(near, total), torch.nextafter(near, -total)):
        for start in range(0, len(row), 64):
            part = slice(start, start + 64)
            tokens = inverse_cdf(p[row[part]], u[part])
            assert (p[row[part], tokens] > 0).all()


def test_inverse_cdf_is_the_inverse_of_the_cdf():
    p = torch.softmax(torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 2, -1)
    ends = p.double().cumsum(0)
    middles = (ends - p.double() / 2) / ends[-1]
    big = (p > 1e-5).nonzero()[:, 0]  # smaller ones lie within the rounding of fp32 block sums
    found = inverse_cdf(p[None].expand(len(big), -1), middles[big])
    assert torch.equal(found, big)


def test_rows_do_not_depend_on_their_neighbours():
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(6)) * 3
    kinds = [
        SamplingParams(temperature=t, top_p=p, top_k=k, seed=s)
        for t, p, k, s in ((1.0, 1.0, 0, 1), (0.7, 1.0, 0, 2), (1.0, 0.9, 7, 1), (0.0, 1.0, 0, 2**64 - 1))
    ]
    params = [kinds[i * i % 4] for i in range(30)]
    keys = [2**64 - 1 - i for i in range(30)]
    together = sample(logits, params, keys, list(range(30)))
    alone = [sample(logits[i : i + 1], params[i : i + 1], keys[i : i + 1], [i]) for i in range(30)]
    assert together == ([ids[0] for ids, _ in alone], [lps[0] for _, lps in alone])


def test_an_underflowed_probability_has_a_finite_log():
    logits = torch.zeros(1, 300)
    logits[0, 5] = 400.0
    assert math.isfinite(float(log_probs(logits, torch.tensor([0]), 1.0)[0]))

"""The tokenizer and its chat template on golden texts and conversations: what goes in comes out, and once."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from croze.errors import DeclarationError
from croze.models.protocol import Tokenizer
from croze.models.tokenizer import load_tokenizer
from croze.plan.checks import Context, Report

PLAIN = "The answer is 42.\n\ndef f(x):\n    return x + 1  # twice:  2 * (x + 1)\n"
UNICODE = "naïve 日本語 العربية Ελληνικά 🦾👩‍🚀 ½ «quoted» e\u0301"
ASKED, SAID = "What is 3 + 4? Tell me.", "It is seven (7)."
_USER, _REPLY = {"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}
_AGAIN = {"role": "user", "content": "And twice that?"}
_SYSTEM = {"role": "system", "content": "Reply with Python."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [_USER],
    "several turns": [_USER, _REPLY, _AGAIN],
    "a system message": [_SYSTEM, _USER],
    "a system message and turns": [_SYSTEM, _USER, _REPLY, _AGAIN],
    "a message in many scripts": [{"role": "user", "content": UNICODE}],
}


def look_at_tokenizer(context: Context, report: Report) -> None:
    """Load it, hold its ids to the model's, send golden texts through, and conversations where tasks are such."""
    assert context.files is not None and context.arch is not None
    tokenizer = load_tokenizer(context.files)
    context.tokenizer = tokenizer
    _look_at_ids(tokenizer, context.arch.vocab, report)
    survives = _look_at_text(tokenizer, report)
    chat = any(isinstance(task.prompt, list) for task in context.tasks)
    if chat:
        with report.part():
            _look_at_chat(tokenizer, report)
    _look_at_stops(tokenizer, context.run.sampling.stop, report)
    if not report.findings:
        ends = ", ".join(repr(tokenizer.decode([i], special=True)) for i in tokenizer.eos_ids)
        what = f"{survives}, {len(CONVERSATIONS)} conversations" if chat else survives
        report.ok(f"{tokenizer.vocab_size} tokens, replies end with {ends}; unchanged on the way: {what}")


def _look_at_ids(tokenizer: Tokenizer, vocab: int, report: Report) -> None:
    if not tokenizer.eos_ids:
        report.warn(
            "tokenizer.eos",
            "no token is known to end a reply: all run to sampling.max_tokens",
            where="tokenizer",
            fix="set eos_token_id in the model's generation_config.json, or use sampling.stop",
        )
    beyond = [i for i in tokenizer.eos_ids if i >= vocab]
    if beyond:
        report.fail(
            "model",
            f"the token that ends a reply is {beyond[0]}, and the model knows {vocab}",
            where="tokenizer",
            fix="is this the tokenizer of another model?",
        )
    elif tokenizer.vocab_size > vocab:
        report.warn(
            "tokenizer.vocab",
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab}",
            where="tokenizer",
            fix="is this the tokenizer of another model? Tokens that the model lacks must not be in prompts",
        )


def _look_at_text(tokenizer: Tokenizer, report: Report) -> str:
    """Which texts survive: encoded and decoded they are as before."""
    survived = []
    for name, text in {"plain text": PLAIN, "Unicode": UNICODE}.items():
        try:
            back = tokenizer.decode(tokenizer.encode(text))
        except DeclarationError:
            if text is PLAIN:
                raise
            continue  # an alphabet without them, which its tasks need not know: their own prompts are rendered too
        if _same(back, text):
            survived.append(name)
        else:
            report.warn(
                "tokenizer.text",
                f"{name} does not come out as it went in: {_first_change(text, back)}",
                where="tokenizer",
                fix="rewards see the changed text; compare what they see with croze trace",
            )
    return ", ".join(survived)


def _look_at_chat(tokenizer: Tokenizer, report: Report) -> None:
    """Raises ModelError where the model has no chat template."""
    texts: dict[str, str] = {}
    for name, messages in CONVERSATIONS.items():
        try:
            ids = tokenizer.render(messages)
        except DeclarationError as error:
            report.warn("tokenizer.roles", f"{name}: {error.message}", where="chat template", fix=error.fix)
            continue
        text = texts[name] = tokenizer.decode(ids, special=True)
        lost = [m["content"] for m in messages if _normal(m["content"]) not in _normal(text)]
        if lost:
            report.fail(
                "tokenizer.template",
                f"{name}: the chat template loses {lost[0]!r:.60}",
                where="chat template",
                fix="see chat_template in the model's tokenizer_config.json or chat_template.jinja",
            )
        if twice := _twice(tokenizer, ids):
            report.fail(
                "tokenizer.twice",
                f"{name}: {twice} stands twice in a row",
                where="chat template",
                fix="the template and the tokenizer both add it: let one of them",
            )
        if tokenizer.encode(text, special=True) != ids:
            report.warn(
                "tokenizer.round_trip",
                f"{name}: its text, encoded again, gives other tokens",
                where="chat template",
                fix="croze encodes nothing twice; what others do with the text may differ",
            )
    if {"one message", "several turns"} <= texts.keys():
        _look_at_turns(tokenizer, texts["one message"], texts["several turns"], report)


def _look_at_turns(tokenizer: Tokenizer, opened: str, whole: str, report: Report) -> None:
    """A prompt must end where the assistant's words begin: the conversation that goes on shows where that is."""
    rest = whole[len(opened) :]
    between, found, _ = rest.partition(SAID)
    if whole.startswith(opened) and found and not between.strip():
        return
    header = tokenizer.encode(between, special=True)
    if (
        whole.startswith(opened)
        and found
        and tokenizer.decode(header) != tokenizer.decode(header, special=True)
    ):
        report.fail(
            "tokenizer.generation_prompt",
            f"a prompt does not end where the reply begins: {between!r:.60} is missing",
            where="chat template",
            fix="let the template heed add_generation_prompt",
        )
    else:
        report.warn(
            "tokenizer.history",
            "the template writes an earlier reply otherwise than it was generated: later turns of a conversation"
            " do not begin with the tokens of earlier ones",
            where="chat template",
            fix="single replies are not concerned; in several turns no prefix can be shared",
        )


def _look_at_stops(tokenizer: Tokenizer, stops: Sequence[str], report: Report) -> None:
    """A stop string is looked for in decoded text, in which special tokens are not."""
    for stop in stops:
        try:
            ids = tokenizer.encode(stop, special=True)
        except DeclarationError:
            ids = []
        if stop in tokenizer.decode(ids):
            continue
        ends_anyway = ids and ids[0] in tokenizer.eos_ids
        report.warn(
            "tokenizer.stop",
            f"the stop string {stop!r} can never be reached: no reply's text holds it",
            where="sampling.stop",
            fix="leave it out: this token ends replies anyway"
            if ends_anyway
            else "give text the model can write",
        )


def _twice(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """A special token that follows itself, as text; empty without."""
    for one, other in pairwise(ids):
        if one == other and not tokenizer.decode([one]) and (text := tokenizer.decode([one], special=True)):
            return repr(text)
    return ""


def _normal(text: str) -> str:
    """Canonically equal texts alike: tokenizers may compose characters."""
    return unicodedata.normalize("NFC", text)


def _same(one: str, other: str) -> bool:
    return _normal(one) == _normal(other)


def _first_change(text: str, back: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back))
    )
    return f"{text[at : at + 12]!r} became {back[at : at + 12]!r}"

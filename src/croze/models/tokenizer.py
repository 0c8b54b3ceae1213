"""Text to token ids and back: a model's own tokenizer through transformers, or croze's character tokenizer.

Two rules hold for both. Text never turns into special tokens by what it spells, except in prompts: a tool's
output that contains ``<|im_end|>`` cannot end a turn. And decoded text holds no special tokens unless asked
for: a reward sees what the model said and not the token with which it stopped.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from croze.errors import DeclarationError, ModelError
from croze.models.protocol import ModelFiles, Tokenizer
from croze.types import Prompt

CHAR_FILE = "croze_tokenizer.json"
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
GENERIC_FAMILIES = ("llama", "qwen3")
_PROBE = "croze-probe"


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer that lies beside the weights. transformers is imported only where the model needs it."""
    if (files.path / CHAR_FILE).is_file():
        return CharTokenizer.load(files.path / CHAR_FILE)
    return HubTokenizer(files)


def _read_hub_files(path: Path) -> Any:
    """transformers' tokenizer for a model folder."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if _names_the_generic_class(path):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, **options)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, **options)


def _names_the_generic_class(path: Path) -> bool:
    """Whether AutoTokenizer would end at transformers' generic class, for families of which that is known. On its way
    there it imports the model's configuration and all that hangs on it: 2 of its 3 CPU-seconds."""
    try:
        told = json.loads((path / "tokenizer_config.json").read_bytes())
        family = json.loads((path / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return False
    return family in GENERIC_FAMILIES and told.get("tokenizer_class") in GENERIC and "auto_map" not in told


class HubTokenizer:
    """A tokenizer and chat template in Hugging Face layout.

    ``eos_ids``: every id that ends a reply, from tokenizer, config and generation config, and the token with
    which the chat template closes a turn. ``vocab_size``: ids the tokenizer knows; the model may have more.
    """

    def __init__(self, files: ModelFiles) -> None:
        self.name = files.name
        self._switch = (
            threading.Lock()
        )  # split_special_tokens is a setting that the calls of all threads share
        try:
            self._hf = _read_hub_files(files.path)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise ModelError(
                f"the tokenizer of {files.name} cannot be loaded: {error}",
                where=str(files.path),
                fix="see that all tokenizer files are there; code that comes with a model is not run",
            ) from error
        self.vocab_size = len(self._hf)
        ends = {self._hf.eos_token_id, self._end_of_turn()}
        for name in ("config.json", "generation_config.json"):
            ends |= _eos_of(files.path / name)
        self.eos_ids: tuple[int, ...] = tuple(sorted(i for i in ends if i is not None))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of ``text`` alone, nothing before or after it; ``special`` reads special tokens in it."""
        return self._encode(text, start=False, special=special)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``; special tokens are left out, or written as they are spelled if ``special``."""
        plain = [int(i) for i in ids]
        return self._hf.decode(plain, skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def render(self, prompt: Prompt) -> list[int]:
        """A prompt's ids.

        Messages go through the chat template, up to where the assistant's reply begins; text is encoded as a
        document's start (with BOS where the model has one). Special tokens are read in both.
        """
        if isinstance(prompt, str):
            return self._encode(prompt, start=True, special=True)
        return self.encode(self._apply_template(_checked(prompt), reply=True), special=True)

    def _encode(self, text: str, *, start: bool, special: bool) -> list[int]:
        with self._switch:
            return self._hf.encode(text, add_special_tokens=start, split_special_tokens=not special)

    def _apply_template(self, messages: list[dict[str, Any]], *, reply: bool) -> str:
        import jinja2

        if not self._hf.chat_template:
            raise ModelError(
                f"{self.name} has no chat template",
                where="prompt",
                fix="give the prompt as text, or use a chat model",
            )
        try:
            text = self._hf.apply_chat_template(messages, add_generation_prompt=reply, tokenize=False)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise DeclarationError(
                f"the chat template of {self.name} refuses these messages: {error}",
                where="prompt",
                fix="see the roles and their order",
            ) from error
        assert isinstance(text, str)
        return text

    def _end_of_turn(self) -> int | None:
        """The special token that the template puts after an assistant's message, if it does."""
        if not self._hf.chat_template:
            return None
        turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            rest = self._apply_template(turns, reply=False).rpartition(_PROBE)[2]
        except DeclarationError:
            return None
        specials = {t.content: i for i, t in self._hf.added_tokens_decoder.items() if t.special}
        ends = [text for text in specials if rest.lstrip().startswith(text)]
        return specials[max(ends, key=len)] if ends else None


def _eos_of(path: Path) -> set[int]:
    """eos_token_id of a config file: absent, one id, or several."""
    if not path.is_file():
        return set()
    value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()


def _checked(messages: Any) -> list[dict[str, Any]]:
    ok = (
        isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    )
    if not ok:
        raise DeclarationError(
            f"chat messages are a list of {{'role': ..., 'content': ...}}, got {messages!r:.200}",
            where="prompt",
            fix="give the prompt as text or as such a list",
        )
    return messages


class CharTokenizer:
    """One id per character, for models small enough to test with.

    File: ``{"type": "char", "chars": "...", "eos": 0, "mark": "="}``. ``chars[i]`` has the id i + 1, and 0 is
    the end. ``mark`` ends a question: ``render`` joins the messages' contents by newlines and puts it last.
    """

    def __init__(self, *, chars: str, eos: int, mark: str) -> None:
        self._chars = dict(enumerate(chars, start=1))
        self._ids = {char: i for i, char in self._chars.items()}
        self._mark = mark
        self.eos_ids: tuple[int, ...] = (eos,)
        self.vocab_size = len(chars) + 1
        if len(self._ids) != len(chars) or eos != 0 or not set(mark) <= set(chars):
            raise ValueError("chars must differ, eos must be 0, and mark must be made of chars")

    @classmethod
    def load(cls, path: Path) -> CharTokenizer:
        try:
            spec = json.loads(path.read_text(encoding="utf-8"))
            if spec["type"] != "char":
                raise ValueError(f"type {spec['type']!r} is not 'char'")
            return cls(chars=spec["chars"], eos=spec["eos"], mark=spec["mark"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"not a character tokenizer: {error}", where=str(path), fix="save it again"
            ) from error

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """One id per character; none spells the end. DeclarationError for one the model does not know."""
        try:
            return [self._ids[char] for char in text]
        except KeyError as error:
            raise DeclarationError(
                f"the model's alphabet has no {error.args[0]!r}",
                where=f"text {text!r:.100}",
                fix="this model reads printable ASCII and newlines",
            ) from None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``, U+FFFD for unassigned ones; the end is left out, or "<eos>" if ``special``."""
        end = "<eos>" if special else ""
        return "".join(end if i in self.eos_ids else self._chars.get(int(i), "\ufffd") for i in ids)

    def render(self, prompt: Prompt) -> list[int]:
        """A prompt's ids: text as it is; messages joined, with the mark after them."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        contents = [m.get("content") for m in _checked(prompt)]
        if not all(isinstance(c, str) for c in contents):
            raise DeclarationError("this model's messages have text contents only", where="prompt")
        return self.encode("\n".join(map(str, contents)) + self._mark)

"""The completion script for zsh."""

from __future__ import annotations

from shlex import quote

from croze.cli.words import Option, Place, Verb, Words

_SCRIPT = r"""#compdef croze
# zsh completion for croze, made by: croze completions zsh

_croze_runs() {
    local -a runs=(runs/*/config.json(N:h:t))
    compadd -X run -a runs
    _path_files -/
}

_croze_file_or_run() {
    _files -g '*.py'
    _croze_runs
}

_croze_keys() {
    local -a keys=(
@KEYS@
    )
    if ! compset -P '*='; then
        _describe -t keys 'key=value' keys -q -S =
        return
    fi
    case ${IPREFIX%=} in
@VALUES@
    esac
}

_croze() {
    local -a verbs=(
@VERBS@
    )
    local state verb
    _arguments -C '(- *)'{-h,--help}'[say how to use it]' '(- *)'{-V,--version}'[which croze it is]' \
        '--json[one JSON object a line]' '1:verb:->verb' '*:: :->words'
    case $state in
    verb) _describe -t verbs verb verbs ;;
    words)
        verb=$words[1]
        case $verb in
@CASES@
        esac
        ;;
    esac
}

if [[ $funcstack[1] == _croze ]]; then
    _croze "$@"
else
    compdef _croze croze
fi
"""


def script(words: Words) -> str:
    parts = {
        "@KEYS@": "\n".join(f"        {quote(_told(key.name, key.doc))}" for key in words.keys),
        "@VALUES@": "\n".join(
            f"    {key.name}) {_call(key.takes, words)} ;;" for key in words.keys if key.takes.kind != "none"
        ),
        "@VERBS@": "\n".join(f"        {quote(_told(verb.name, verb.summary))}" for verb in words.verbs),
        "@CASES@": "\n".join(_case(verb, words) for verb in words.verbs),
    }
    text = _SCRIPT
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def _told(word: str, text: str) -> str:
    """``word:description``, as _describe reads it."""
    return f"{word}:{text}".replace("\\", "\\\\") if ":" not in word else word.replace(":", "\\:")


def _case(verb: Verb, words: Words) -> str:
    specs = [_option(option, words) for option in verb.options]
    for at, place in enumerate(verb.places, 1):
        where = "*" if place.many else str(at) if place.needed else f"{at}:"
        specs.append(quote(f"{where}:{_plain(place.name)}:{_action(place, words)}"))
    lines = " \\\n            ".join(["_arguments", *specs])
    return f"        {verb.name}) {lines} ;;"


def _option(option: Option, words: Words) -> str:
    takes = "" if option.takes is None else f":{_plain(option.takes.name)}:{_action(option.takes, words)}"
    told = quote(f"[{_plain(option.help)}]{takes}")
    if len(option.flags) == 1:
        return option.flags[0] + told
    excluded = quote(f"({' '.join(option.flags)})")
    return f"{excluded}{{{','.join(option.flags)}}}{told}"


def _plain(text: str) -> str:
    """Text within a spec of _arguments."""
    for character in "\\:[]":
        text = text.replace(character, "\\" + character)
    return text


def _action(place: Place, words: Words) -> str:
    match place.kind:
        case "file":
            return '_files -g "*.py"'
        case "run":
            return "_croze_runs"
        case "file or run":
            return "_croze_file_or_run"
        case "key":
            return "_croze_keys"
        case "folder":
            return "_path_files -/"
        case "section":
            return f"({' '.join(words.sections)})"
        case "choice":
            return f"({' '.join(place.choices)})"
    return " "


def _call(place: Place, words: Words) -> str:
    """What a key takes, as a command."""
    return f"compadd {' '.join(place.choices)}" if place.kind == "choice" else _action(place, words)

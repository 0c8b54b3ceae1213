"""The completion script for fish."""

from __future__ import annotations

from croze.cli.words import Option, Place, Verb, Words

_SCRIPT = r"""# fish completion for croze, made by: croze completions fish

function __croze_verb  # whether the verb is one of the arguments; without any: whether there is none yet
    for word in (commandline -opc)[2..]
        if test $word != --json
            contains -- $word $argv
            return
        end
    end
    not set -q argv[1]
end

function __croze_place  # whether $argv[1] words fill a place already; the others: options that take the next word
    set -l words (commandline -opc)[2..]
    set -l place -1
    set -l skip no
    for word in $words
        if test $skip = yes
            set skip no
        else if contains -- $word $argv[2..]
            set skip yes
        else if not string match -q -- '-*' $word
            set place (math $place + 1)
        end
    end
    if test $argv[1] = many
        test $place -ge 1
    else
        test $place -eq $argv[1]
    end
end

function __croze_runs
    for config in runs/*/config.json
        string replace -r '^runs/(.*)/config.json$' '$1\trun' $config
    end
end

function __croze_keys
    set -l word (commandline -ct)
    if not string match -q '*=*' -- $word
        printf '%s\n' @KEYS@
        return
    end
    set -l key (string split -m 1 = -- $word)[1]
    switch $key
@VALUES@
    end
end

complete -c croze -f
complete -c croze -n __croze_verb -s h -l help -d 'say how to use it'
complete -c croze -n __croze_verb -s V -l version -d 'which croze it is'
complete -c croze -n __croze_verb -l json -d 'one JSON object a line'
@VERBS@
"""


def script(words: Words) -> str:
    keys = " \\\n            ".join(_quoted(f"{key.name}=\t{key.doc}") for key in words.keys)
    parts = {
        "@KEYS@": keys,
        "@VALUES@": "\n".join(
            f"        case {key.name}\n            {_values(key.takes)}"
            for key in words.keys
            if key.takes.kind != "none"
        ),
        "@VERBS@": "\n".join(line for verb in words.verbs for line in _verb(verb, words)),
    }
    text = _SCRIPT
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def _verb(verb: Verb, words: Words) -> list[str]:
    lines = ["", f"complete -c croze -n __croze_verb -a {verb.name} -d {_quoted(verb.summary)}"]
    of = f"__croze_verb {verb.name}"
    taking = " ".join(flag for option in verb.options if option.takes for flag in option.flags)
    lines += [_option(of, option, words) for option in verb.options]
    for at, place in enumerate(verb.places):
        fill = _fill(place, words)
        where = f"{at}" if not place.many else "many" if at else ""
        condition = f"{of}; and __croze_place {where} {taking}".rstrip() if where else of
        if fill:
            lines.append(f"complete -c croze -n {_quoted(condition)} {fill}")
    return lines


def _option(of: str, option: Option, words: Words) -> str:
    flags = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
    takes = "" if option.takes is None else f" -x {_fill(option.takes, words)}"
    return f"complete -c croze -n {_quoted(of)} {' '.join(flags)} -d {_quoted(option.help)}{takes.rstrip()}"


def _fill(place: Place, words: Words) -> str:
    match place.kind:
        case "file":
            return "-k -a '(__fish_complete_suffix .py)'"
        case "run":
            return "-a '(__croze_runs) (__fish_complete_directories)'"
        case "file or run":
            return "-a '(__fish_complete_suffix .py) (__croze_runs)'"
        case "key":
            return "-a '(__croze_keys)'"
        case "folder":
            return "-a '(__fish_complete_directories)'"
        case "section":
            return f"-a {_quoted(' '.join(words.sections))}"
        case "choice":
            return f"-a {_quoted(' '.join(place.choices))}"
    return ""


def _values(place: Place) -> str:
    if place.kind == "folder":
        return "for folder in (__fish_complete_directories (string split -m 1 = -- $word)[2]); echo $key=$folder; end"
    return f"printf '%s\\n' $key={{{','.join(place.choices)}}}"


def _quoted(text: str) -> str:
    """A fish string: within single quotes only those and backslashes are escaped."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

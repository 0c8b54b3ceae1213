"""The completion script for bash, from 3.2 on."""

from __future__ import annotations

from shlex import quote

from croze.cli.words import Place, Verb, Words

_SCRIPT = r"""# bash completion for croze, made by: croze completions bash

_croze_words() {  # those of $1 that begin with $cur, each followed by $2
    local word
    for word in $1; do
        [[ $word == "$cur"* ]] && COMPREPLY+=("$prefix$word$2")
    done
}

_croze_paths() {  # folders, and files that end in $1 where it is not empty
    local path
    compopt -o filenames 2>/dev/null
    while IFS= read -r path; do
        COMPREPLY+=("$prefix$path")
    done < <(
        compgen -d -- "$cur"
        [[ -n $1 ]] && compgen -f -X "!*$1" -- "$cur"
    )
}

_croze_runs() {  # names of runs under runs/; where none fits, folders
    local config name
    for config in runs/*/config.json; do
        name=${config#runs/}
        name=${name%/config.json}
        [[ -f $config && $name == "$cur"* ]] && COMPREPLY+=("$name")
    done
    ((${#COMPREPLY[@]})) || _croze_paths ''
}

_croze_keys() {
    local key=${cur%%=*}
    if [[ $cur != *=* ]]; then
        compopt -o nospace 2>/dev/null
        _croze_words "$_croze_all_keys" =
        return
    fi
    cur=${cur#*=}
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=$key=  # there '=' ends a word: only what is behind it is replaced
    case $key in
@VALUES@
    esac
}

_croze_place() {  # $place: how many words before the cursor fill a place; $1: options that take the next word
    local word skip=''
    for word in "${words[@]:start:${#words[@]} - start - 1}"; do
        if [[ $skip ]]; then
            skip=''
        elif [[ $word == -* ]]; then
            [[ " $1 " == *" $word "* ]] && skip=1
        else
            ((place += 1))
        fi
    done
}

_croze() {
    local cur prefix='' previous verb='' word i start=1 place=0
    local -a words=()
    COMPREPLY=()
    for ((i = 0; i <= COMP_CWORD; i++)); do  # put together again what '=' took apart
        word=${COMP_WORDS[i]}
        if ((${#words[@]} > 1)) && [[ $word == =* || ${words[${#words[@]} - 1]} == *= ]] &&
            ! { ((i == COMP_CWORD)) && [[ -z $word && ${COMP_LINE:0:COMP_POINT} == *[[:space:]] ]]; }; then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
    done
    cur=${words[${#words[@]} - 1]}
    previous=${words[${#words[@]} - 2]}
    for word in "${words[@]:1:${#words[@]} - 2}"; do
        ((start += 1))
        [[ $word != --json ]] && verb=$word && break
    done
    case $verb in
    '') _croze_words '@VERBS@ --help --json --version' ;;
@CASES@
    esac
}

_croze_all_keys='@KEYS@'
complete -F _croze croze
"""


def script(words: Words) -> str:
    parts = {
        "@VALUES@": "\n".join(
            f"    {key.name}) {_fill(key.takes, words)} ;;" for key in words.keys if key.takes.kind != "none"
        ),
        "@VERBS@": " ".join(verb.name for verb in words.verbs),
        "@CASES@": "\n".join(_case(verb, words) for verb in words.verbs),
        "@KEYS@": " ".join(key.name for key in words.keys),
    }
    text = _SCRIPT
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


def _case(verb: Verb, words: Words) -> str:
    """A verb: what the option before the cursor takes, else options, else what belongs into the place."""
    taking = {flag: option.takes for option in verb.options for flag in option.flags if option.takes}
    flags = [flag for option in verb.options for flag in option.flags]
    lines = [f"    {verb.name})"]
    if taking:
        cases = [f"        {flag}) {_fill(place, words)}; return ;;" for flag, place in taking.items()]
        lines += ["        case $previous in", *cases, "        esac"]
    lines.append(f"        [[ $cur == -* ]] && _croze_words {quote(' '.join(flags))} && return")
    if verb.places:
        last = len(verb.places) - 1
        cases = [
            f"        {'*' if at == last and place.many else at}) {_fill(place, words)} ;;"
            for at, place in enumerate(verb.places)
        ]
        lines += [
            f"        _croze_place {quote(' '.join(taking))}",
            "        case $place in",
            *cases,
            "        esac",
        ]
    return "\n".join([*lines, "        ;;"])


def _fill(place: Place, words: Words) -> str:
    match place.kind:
        case "file":
            return "_croze_paths .py"
        case "run":
            return "_croze_runs"
        case "file or run":
            return "_croze_paths .py; _croze_runs"
        case "key":
            return "_croze_keys"
        case "section":
            return f"_croze_words {quote(' '.join(words.sections))}"
        case "folder":
            return "_croze_paths ''"
        case "choice":
            return f"_croze_words {quote(' '.join(place.choices))}"
    return ":"

"""Redaction: removes probable secrets from texts for the dashboard and for Sentry.

The worker masks arguments that a task declares as `sensitive` (`sensitive.py`). This module removes secrets
that were not declared:

- values next to a name that suggests a secret (`password=x`, `"api_key": "x"`, `--token x`), or after such a
name in prose (`password is x`, `PIN 1234`, `your code is 123456`);
- secrets with a known format: private keys in PEM, bearer tokens, JSON Web Tokens, passwords in URLs, and
  keys
with the prefixes of the services that issue them.

If a value is a list or a map, the rest of the text is removed, because the end of the value is unknown. If a
text is ambiguous, more of it is removed.

Limit: a secret without a recognizable name or format is not removed; declare it in `sensitive`.
"""

import re

from umbel.protocol.delivery.sensitive import MASK

TEXT_MAX = 65_536  # longer texts are truncated


def _any_of(*patterns: str) -> str:
    return f"(?:{'|'.join(patterns)})"


# ---- names of secrets ------------------------------------------------------------------------------

_WORD, _END_OF_WORD = r"(?<![a-z])", r"(?![a-z])"
_JOINT = r"[\s_-]?"
_PASSWORDS = _any_of(
    *(r"passw(?:or)?d", "passphrase", "passcode", "pwd"),
    *("passwort", "kennwort", r"contrase[ñn]a", "senha", "wachtwoord"),
)
_PIN = _any_of(
    rf"{_WORD}pin(?:{_JOINT}(?:code|number|no))?{_END_OF_WORD}",
    r"(?-i:(?<=[a-z])Pin(?:Code|Number)?(?![a-z]))",  # userPin
)
_CODE = _any_of(
    rf"{_WORD}[ht]?otp(?:{_JOINT}code)?{_END_OF_WORD}",
    rf"{_WORD}(?:cvv2?|cvc2?|csc|mfa|2fa){_END_OF_WORD}",
    _any_of(
        *("verification", "security", "confirmation", r"auth(?:entication|orization)?", "access", "login"),
        *(rf"sign{_JOINT}in", "sms", "mfa", "2fa", rf"(?:two|second){_JOINT}factor", "recovery", "backup"),
        *("reset", "activation", rf"one{_JOINT}time", "unlock"),
    )
    + rf"{_JOINT}codes?",
)
_NAMES = _any_of(
    *(_PASSWORDS, rf"{_WORD}pass{_END_OF_WORD}", _PIN, _CODE),
    *("secret", "token", "credential", "cookie", "signature", "jwt", "mnemonic", rf"seed{_JOINT}phrase"),
    r"auth(?!or(?!i[sz]))(?:ori[sz]ation)?",  # not an author, nor an authority
    rf"(?:api|private|access|encryption|signing|account|master|ssh|license){_JOINT}key",
    *(rf"session{_JOINT}id", rf"connection{_JOINT}string", rf"{_WORD}dsn{_END_OF_WORD}", rf"{_WORD}sig(?==)"),
)
_NAME = re.compile(_NAMES, re.IGNORECASE)

# ---- values next to a name -------------------------------------------------------------------------

_QUOTE = r"(?:\\{0,8}[\"'])"  # with backslashes: JSON within JSON
_SPACE = r"\s{0,5}"
_SEPARATOR = (
    rf"(?:{_QUOTE}?{_SPACE}(?:[:=]>?|->){{1,2}}|{_QUOTE}{_SPACE},|{_SPACE},(?={_SPACE}[\"'])){_SPACE}"
)
_QUOTED = _any_of(
    r"(?P<slashes>\\{1,8})(?P<quote>[\"'])"
    r"(?:(?!(?<!\\)(?P=slashes)(?P=quote))[\s\S])*(?:(?P=slashes)(?P=quote))?",
    r"b?\"(?:[^\"\\]|\\[\s\S])*\"?",
    r"b?'(?:[^'\\]|\\[\s\S])*'?",
)
_OF_SCHEME = r"(?:bearer|basic|digest|token|apikey|negotiate)\s{1,5}[^\s,;)}\]'\"]+"
_VALUE = re.compile(
    rf"({_NAMES}[\w.-]{{0,40}}(?:\[\w{{0,20}}\])?(?:\s(?:for|of)(?:\s[^\s=:]{{1,40}}){{1,3}}?)?{_SEPARATOR})"
    + _any_of(_OF_SCHEME, _QUOTED, r"[\[({][\s\S]*", r"[^\s,;)}\]]+"),
    re.IGNORECASE,
)
_OPTION = re.compile(  # --password x
    rf"((?<![\w-])--?[\w-]{{0,40}}?{_NAMES}[\w-]{{0,40}}\s{{1,5}})"
    r"(?:\"[^\"]*\"?|'[^']*'?|[^\s\-\"',;)}\]][^\s\"',;)}\]]*)",
    re.IGNORECASE,
)
_ELEMENT = re.compile(  # <password>x</password>
    rf"(<[\w:.-]{{0,40}}{_NAMES}[\w:.-]{{0,40}}(?:\s[^<>]{{0,200}})?>)[^<]{{1,2000}}", re.IGNORECASE
)
_PORT = r"\d{1,5}(?:[/?#\s\"',;:)}\]>…]|\.(?:\s|$)|$)"
_URL = re.compile(  # to the last `@`; without one it was cut, if it is no port
    rf"(://[^\s:/@\[]{{0,200}}:)(?:[^\s\"']{{1,1000}}(?=@)|(?!{_PORT})[^\s\"'@]{{1,1000}})"
)

# ---- values in prose -------------------------------------------------------------------------------

# The next word is the value, unless the sentence continues about the password: `password reset for ann`.
_GOES_ON = _any_of(
    *("a", "an", "and", "are", "as", "at", "authentication", "be", "been", "before", "but", "by", "can"),
    *("cannot", "changed?", "changes", "check", "could", "did", "do", "does", "entered", "entry", "error"),
    *("expired?", "expires", "failed", "failure", "field", "file", "for", "from", "given", "grant", "has"),
    *("hash(?:er|ing)?", r"\w{2,6}n't", "have", "if", "in", "incorrect", "input", "invalid", "is", "it"),
    *("length", "login", "manager", "may", "mismatch", "missing", "must", "needed", "needs", "no", "not"),
    *("of", "on", "or", "policy", "prompt", "protected", "provided", "required", "reset", "rotation"),
    *("rules?", "set", "should", "so", "store", "strength", "than", "that", "the", "to", "too", "updated?"),
    *("validation", "validator", "was", "were", "when", "which", "will", "with", "without", "wrong", "yet"),
)
_THEN = (
    r"(?:[\s:]{1,3}(?:for|of)(?:\s\S{1,40}?){1,3}?)?"
    r"(?:\s{1,3}(?:is|was|are|of|now|equals?|=|:|->|=>)){0,2}[\s:]{1,3}"
)
_SPOKEN_PASSWORD = re.compile(
    rf"({_PASSWORDS}s?{_THEN})(?!{_GOES_ON}\b)(?:\"[^\"]*\"?|'[^']*'?|`[^`]*`?|[^\s,;)}}\]\"'`]+)",
    re.IGNORECASE,
)
_YOUR_CODE = rf"{_WORD}your\s(?:[a-z-]{{1,20}}\s){{0,3}}code"
_SPOKEN_CODE = re.compile(
    rf"({_any_of(_PIN, _CODE, _YOUR_CODE)}{_THEN}[\"'`]?)(?=[\w-]{{0,12}}\d)[A-Za-z0-9-]{{3,16}}\b",
    re.IGNORECASE,
)
_CODE_FIRST = re.compile(  # 123456 is your verification code
    r"()\b\d{3}[\s-]?\d{1,5}"
    rf"(?=\s(?:is|as)\s(?:your|the|a)\s(?:[a-z-]{{1,20}}\s){{0,3}}{_any_of(_PIN, _CODE, 'code')})",
    re.IGNORECASE,
)

# ---- secrets by their form -------------------------------------------------------------------------

_BEARER = re.compile(
    r"\b((?:bearer|basic|negotiate|apikey|token)\s{1,5})(?=[\w.~+/=-]{0,200}[\d=])[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
_PREFIXED = re.compile(  # by the prefixes of services that issue them; JSON Web Tokens begin with eyJ
    r"()(?<![A-Za-z0-9])"
    + _any_of(
        *(r"gh[pousr]_\w{20,}", r"github_pat_\w{20,}", r"gl(?:pat|dt|rt)-[\w-]{16,}"),
        *(r"xox[abeoprs]-[\w-]{8,}", r"xapp-[\w-]{8,}", r"(?:AKIA|ASIA|AROA)[0-9A-Z]{12,}"),
        *(r"AIza[\w-]{30,}", r"ya29\.[\w-]{16,}", r"GOCSPX-[\w-]{16,}", r"(?:sk|rk)_(?:live|test)_\w{10,}"),
        *(
            r"whsec_\w{10,}",
            r"sk-[\w-]{20,}",
            r"npm_\w{20,}",
            r"pypi-[\w-]{16,}",
            r"SG\.[\w-]{10,}\.[\w-]{10,}",
        ),
        *(r"dop_v1_\w{20,}", r"dckr_pat_[\w-]{16,}", r"hf_\w{20,}", r"shp(?:at|ca|pa|ss)_\w{16,}"),
        *(r"sq0(?:atp|csp)-[\w-]{16,}", r"AGE-SECRET-KEY-1\w{20,}", r"umbel_[\w-]{20,}"),
        r"eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*){0,3}",
    )
)

# Most texts contain no secret, and a search for these strings is faster than the patterns.
_HINTS = (
    *("pass", "pwd", "kennwort", "contrase", "senha", "wachtwoord", "pin", "otp", "cvv", "cvc", "csc", "mfa"),
    *("2fa", "code", "secret", "token", "credential", "cookie", "sig", "jwt", "mnemonic", "phrase", "auth"),
    *("key", "session", "connection", "dsn", "://"),
)
_FORMS = (
    *(
        "bearer",
        "basic",
        "negotiate",
        "apikey",
        "token",
        "gh",
        "gl",
        "xox",
        "xapp",
        "github",
        "akia",
        "asia",
        "aroa",
    ),
    *("aiza", "ya29", "gocspx", "_live_", "_test_", "whsec", "sk-", "npm_", "pypi-", "sg.", "dop_", "dckr"),
    *("hf_", "shp", "sq0", "age-", "umbel_", "eyj"),
)
_NAMED = (_VALUE, _OPTION, _ELEMENT, _URL, _SPOKEN_PASSWORD, _SPOKEN_CODE, _CODE_FIRST)
_FORMED = (_BEARER, _PREFIXED)
_PEM = re.compile(r"-{4,5}\s?(BEGIN|END)\s([^-\r\n]{0,60})(?:\s?-{4,5})?")
_IN_PEM = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-:,. \r\n\\")


def redact(text: str) -> str:
    """Return the text without probable secrets, truncated to TEXT_MAX."""
    text = text[:TEXT_MAX]
    if "----" in text:
        text = _without_private_keys(text)
    lower = text.lower()
    patterns = _NAMED if any(hint in lower for hint in _HINTS) else ()
    for pattern in (*patterns, *(_FORMED if any(form in lower for form in _FORMS) else ())):
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def is_secret(name: str) -> bool:
    """Return whether the name of a mapping entry suggests a secret."""
    return _NAME.search(name) is not None


def _without_private_keys(text: str) -> str:
    """Remove private keys in PEM format, including keys whose beginning or end was truncated."""
    parts: list[str] = []
    done, is_inside = 0, False
    for found in _PEM.finditer(text):
        is_private = "PRIVATE KEY" in found[2] or "SECRET KEY" in found[2]
        if found[1] == "BEGIN" and is_private and not is_inside:
            parts += (text[done : found.start()], MASK)
            is_inside = True
        elif found[1] == "END" and (is_private or is_inside):
            if not is_inside:
                parts += (text[done : _body_start(text, done, found.start())], MASK)
            done, is_inside = found.end(), False
    return "".join([*parts, *([] if is_inside else [text[done:]])])


def _body_start(text: str, start: int, end: int) -> int:
    """Return where the lines of a key begin, if its last line ends at `end`."""
    while end > start and text[end - 1] in _IN_PEM:
        end -= 1
    return end

"""Checks strings by the formats of JSON schema, such as ``date`` or ``email``."""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

from engine.structured.checked.expressions import is_expression
from engine.structured.schemas import DATE, LABEL

MOST_LOCAL = 64  # characters before the "@", by RFC 5321
Check = Callable[[str], bool]

_OFFSET = r"(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?" + _OFFSET
_HOST = rf"(?=.{{1,253}}\Z){LABEL}(?:\.{LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_IDN_ATOM = r"(?:[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]|[^\x00-\x7F\s])+"
_QUOTED = r'"(?:[\x20\x21\x23-\x5B\x5D-\x7E]|\\[\x20-\x7E])*"'
_LOCAL = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})"
_DURATION = (
    r"P(?:\d+W|(?=\d|T\d)(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)?"
    r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))?)"
)
_UNRESERVED = r"A-Za-z0-9._~\-"
_SUB = r"!$&'()*+,;="
_MORE = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF\U00010000-\U000EFFFD"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:\.?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*"
_VARIABLES = rf"{_VARIABLE}(?::[1-9]\d{{0,3}}|\*)?"
_TEMPLATE = (
    rf"(?:[^\x00-\x20\"'<>%\\^`{{|}}]|%[0-9A-Fa-f]{{2}}"
    rf"|\{{[+#./;?&=,!@|]?{_VARIABLES}(?:,{_VARIABLES})*\}})*"
)


def _reference(more: str) -> tuple[str, str]:
    """Return the patterns of absolute URIs and of relative references, by RFC 3986. more:
    additional characters that are allowed, such as those of RFC 3987."""
    hexes = "%[0-9A-Fa-f]{2}"
    char = rf"(?:[{_UNRESERVED}{_SUB}:@{more}]|{hexes})"
    first = rf"(?:[{_UNRESERVED}{_SUB}@{more}]|{hexes})+"
    user = rf"(?:[{_UNRESERVED}{_SUB}:{more}]|{hexes})*@"
    name = rf"(?:[{_UNRESERVED}{_SUB}{more}]|{hexes})*"
    literal = rf"\[(?:(?P<ip>[0-9A-Fa-f:.]+)|v[0-9A-Fa-f]+\.[{_UNRESERVED}{_SUB}:]+)\]"
    authority = rf"//(?:{user})?(?:{literal}|{name})(?::\d*)?(?:/{char}*)*"
    absolute = rf"/(?:{char}+(?:/{char}*)*)?"
    rest = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    scheme = r"[A-Za-z][A-Za-z0-9+.\-]*:"
    rootless = rf"{char}+(?:/{char}*)*"
    relative = rf"{first}(?:/{char}*)*"
    return (
        rf"{scheme}(?:{authority}|{absolute}|{rootless}|){rest}",
        rf"(?:{authority}|{absolute}|{relative}|){rest}",
    )


def _matching(pattern: str) -> Check:
    found = re.compile(pattern)
    return lambda text: found.fullmatch(text) is not None


def _address(patterns: tuple[str, ...]) -> Check:
    found = [re.compile(pattern) for pattern in patterns]

    def check(text: str) -> bool:
        for each in found:
            if (match := each.fullmatch(text)) is not None:
                return match["ip"] is None or _ipv6(match["ip"])
        return False

    return check


def _ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return "%" not in text


def _ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return text.isascii()


def _host(text: str) -> bool:
    """Check a host name. A label that begins with ``xn--`` must encode an international label."""
    others = [label for label in text.split(".") if label[2:4] == "--"]
    return _ascii_host(text) and (not others or _idn_host(".".join(others)))


def _idn_host(text: str) -> bool:
    import idna

    try:
        written = idna.encode(text).decode()
    except UnicodeError:
        return False
    return _ascii_host(written)


def _email(text: str) -> bool:
    local, _, host = text.rpartition("@")
    if not _local(local) or len(local) > MOST_LOCAL:
        return False
    if host.startswith("[") and host.endswith("]"):
        inner = host[1:-1]
        return _ipv6(inner[5:]) if inner.startswith("IPv6:") else _ipv4(inner)
    return _host(host)


def _idn_email(text: str) -> bool:
    local, _, host = text.rpartition("@")
    return _idn_local(local) and len(local) <= MOST_LOCAL and _idn_host(host)


def _time(text: str) -> bool:
    """Check a time. A leap second is only valid at the end of a day in UTC."""
    if not _clock(text):
        return False
    if text[6:8] != "60":
        return True
    minutes = int(text[:2]) * 60 + int(text[3:5])
    if text[-1] not in "Zz":
        offset = int(text[-5:-3]) * 60 + int(text[-2:])
        minutes += offset if text[-6] == "-" else -offset
    return minutes % 1440 == 1439


def _date_time(text: str) -> bool:
    return text[10:11] in ("T", "t") and _date(text[:10]) and _time(text[11:])


_date = _matching(f"(?a:{DATE})")
_clock = _matching(f"(?a:{_TIME})")
_ascii_host = _matching(_HOST)
_local = _matching(_LOCAL)
_idn_local = _matching(rf"(?:{_IDN_ATOM}(?:\.{_IDN_ATOM})*|{_QUOTED})")
_uri, _uri_reference = _reference("")
_iri, _iri_reference = _reference(_MORE)
FORMATS: dict[str, Check] = {
    "date": _date,
    "time": _time,
    "date-time": _date_time,
    "duration": _matching(f"(?a:{_DURATION})"),
    "email": _email,
    "idn-email": _idn_email,
    "hostname": _host,
    "idn-hostname": _idn_host,
    "ipv4": _ipv4,
    "ipv6": _ipv6,
    "uri": _address((_uri,)),
    "uri-reference": _address((_uri, _uri_reference)),
    "iri": _address((_iri,)),
    "iri-reference": _address((_iri, _iri_reference)),
    "uri-template": _matching(f"(?a:{_TEMPLATE})"),
    "uuid": _matching(_UUID),
    "regex": is_expression,
    "json-pointer": _matching(_POINTER),
    "relative-json-pointer": _matching(rf"(?a:(?:0|[1-9]\d*)(?:#|{_POINTER}))"),
}

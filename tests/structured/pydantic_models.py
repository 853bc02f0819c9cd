"""Fifty pydantic models, of which what a form lets pass must be accepted by the model.

``MODELS`` has types; ``WIDER`` names those whose JSON schema allows more than the model does, and
why: for them the schema alone judges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar
from uuid import UUID

from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    HttpUrl,
    JsonValue,
    RootModel,
    SecretStr,
    StringConstraints,
    Tag,
    TypeAdapter,
    computed_field,
    conint,
    conlist,
    conset,
    constr,
)
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from structured.written import SchemaCase

T = TypeVar("T")
K = TypeVar("K")
Slug = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{1,15}$")]
Percent = Annotated[float, Field(ge=0, le=100, multiple_of=0.5)]


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    MIDDLE = 5
    HIGH = 10


class Address(BaseModel):
    street: str = Field(max_length=40)
    city: str
    zip: Annotated[str, Field(pattern=r"^\d{5}(-\d{4})?$")]


class SetOfStrings(BaseModel):
    tags: set[str]


class SetOfEnum(BaseModel):
    colours: set[Colour] = Field(min_length=1)


class AllOfAnEnum(BaseModel):
    """No value is left when the set is full."""

    colours: set[Colour] = Field(min_length=3)


class FrozenSets(BaseModel):
    numbers: frozenset[int] = Field(max_length=4)
    flags: frozenset[bool] = frozenset()


class SetOfLiterals(BaseModel):
    sides: set[Literal["left", "right", 1, True, None]]


class SetOfTuples(BaseModel):
    edges: set[tuple[int, int]] = Field(max_length=5)


class ConSet(BaseModel):
    codes: conset(constr(pattern=r"^[A-C]\d$"), min_length=2, max_length=6)  # type: ignore[valid-type]


class SetInUnion(BaseModel):
    either: set[int] | set[str] | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str
    tricks: set[Literal["sit", "roll", "fetch"]] = set()


class Fish(BaseModel):
    kind: Literal["fish", "shark"]
    depth: float


Pet = Annotated[Cat | Dog | Fish, Field(discriminator="kind")]


class Owner(BaseModel):
    pets: list[Pet] = Field(max_length=3)


class NestedDiscriminators(BaseModel):
    pet: Pet
    payment: Annotated[
        Annotated[Card | Cash, Field(discriminator="method")] | Transfer,
        Field(discriminator="kind"),
    ]


class Card(BaseModel):
    kind: Literal["direct"]
    method: Literal["card"]
    number: Annotated[str, Field(pattern=r"^\d{16}$")]


class Cash(BaseModel):
    kind: Literal["direct"]
    method: Literal["cash"]
    amount: Annotated[int, Field(gt=0, multiple_of=5)]


class Transfer(BaseModel):
    kind: Literal["transfer"]
    iban: Annotated[str, Field(min_length=15, max_length=34, pattern=r"^[A-Z]{2}[0-9A-Z]+$")]


def _kind_of(value: Any) -> str:
    if isinstance(value, dict):
        return "long" if "lines" in value else "short"
    return "long" if isinstance(value, LongNote) else "short"


class LongNote(BaseModel):
    lines: list[str] = Field(min_length=1)


class ShortNote(BaseModel):
    text: str


class CallableDiscriminator(BaseModel):
    note: Annotated[
        Annotated[LongNote, Tag("long")] | Annotated[ShortNote, Tag("short")],
        Discriminator(_kind_of),
    ]


class Constrained(BaseModel):
    count: conint(gt=0, le=1000)  # type: ignore[valid-type]
    even: Annotated[int, Field(multiple_of=2, ge=-10, lt=10)]
    share: Percent
    code: constr(min_length=3, max_length=8, pattern=r"^[A-Z]+$")  # type: ignore[valid-type]
    few: conlist(int, min_length=1, max_length=3)  # type: ignore[valid-type]


class Decimals(BaseModel):
    price: Decimal
    rate: Annotated[Decimal, Field(gt=0, lt=1)]


class DigitsOfDecimals(BaseModel):
    price: Annotated[Decimal, Field(max_digits=6, decimal_places=2)]
    step: Annotated[Decimal, Field(multiple_of=Decimal("0.25"), ge=0, le=10)]


class MultipleOfFloat(BaseModel):
    step: Annotated[float, Field(multiple_of=0.1, ge=0, le=3)]
    whole: Annotated[float, Field(multiple_of=3)]


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class LinkedList(BaseModel):
    head: int
    tail: LinkedList | None = None


class Expression(BaseModel):
    node: Number | Binary


class Number(BaseModel):
    type: Literal["number"]
    value: float


class Binary(BaseModel):
    type: Literal["binary"]
    operator: Literal["+", "-", "*", "/"]
    left: Number | Binary
    right: Number | Binary


class Folder(BaseModel):
    name: Slug
    entries: dict[Slug, Folder] = {}
    tags: set[Slug] = set()


class Page(BaseModel, Generic[T]):
    items: list[T] = Field(max_length=3)
    next: str | None = None


class Pair(BaseModel, Generic[T, K]):
    first: T
    second: K


class Result(BaseModel, Generic[T]):
    model_config = ConfigDict(extra="forbid")
    ok: T | None = None
    errors: set[str] = set()


class ConstrainedKeys(BaseModel):
    by_code: dict[Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}$")], int]
    by_colour: dict[Colour, int] = {}
    by_length: dict[Annotated[str, StringConstraints(min_length=2, max_length=4)], bool] = {}


class LimitedDict(BaseModel):
    scores: dict[str, int] = Field(min_length=2, max_length=4)


class LimitedEnumDict(BaseModel):
    """A dict that must have as many members as there are names."""

    scores: dict[Literal["a", "b", "c"], int] = Field(min_length=3)


class DictOfSets(BaseModel):
    groups: dict[str, set[Literal[1, 2, 3]]] = Field(max_length=3)


class Enums(BaseModel):
    colour: Colour
    level: Level
    mode: Literal["fast", "slow", 3, False]
    fixed: Literal["only"] = "only"


class Times(BaseModel):
    day: date
    at: time
    when: datetime
    lasting: timedelta


class Names(BaseModel):
    id: UUID
    v4: IPv4Address
    v6: IPv6Address
    secret: SecretStr


class Urls(BaseModel):
    home: HttpUrl
    other: AnyUrl | None = None


class EmailLike(BaseModel):
    mail: Annotated[str, Field(json_schema_extra={"format": "email"})]
    copies: set[Annotated[str, Field(json_schema_extra={"format": "email"})]] = set()


class Forbidding(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str = ""
    c: list[int] = []


class Allowing(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]
    name: str


class Aliases(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")
    first_name: str
    last_name: str = Field(alias="surname")
    year_of_birth: int | None = Field(None, validation_alias="yearOfBirth")


class Computed(BaseModel):
    width: int = Field(ge=1)
    height: int = Field(ge=1)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.width * self.height


class Inherited(Address):
    model_config = ConfigDict(title="An address with more")
    country: Literal["DE", "FR", "JP"] = "DE"
    lines: Annotated[list[str], Field(max_length=2)] | None = None


class Tuples(BaseModel):
    point: tuple[float, float]
    row: tuple[str, int, bool]
    rest: tuple[int, ...] = ()


class Unions(BaseModel):
    value: int | str | list[int] | Address | None
    strict: Annotated[int, Field(strict=True)] | Annotated[str, Field(max_length=5)]


class AnyJson(BaseModel):
    payload: JsonValue
    free: Any = None


class Numbers(RootModel[conlist(Annotated[int, Field(ge=0)], min_length=1, max_length=5)]):  # type: ignore[misc]
    """A list at the top, within an object of its own."""


class Wrapped(BaseModel):
    numbers: Numbers
    names: RootSet


class RootSet(RootModel[set[Colour]]):
    pass


class RootUnion(RootModel[Pet]):
    pass


class Movie(TypedDict):
    title: Annotated[str, Field(max_length=20)]
    year: NotRequired[Annotated[int, Field(ge=1890, le=2100)]]
    genres: set[Literal["drama", "comedy"]]


@dataclass
class Point:
    x: float
    y: float = 0.0
    labels: frozenset[Literal["a", "b"]] = frozenset()


@plain_dataclass
class Order:
    id: UUID
    lines: list[tuple[Slug, Annotated[int, Field(ge=1, le=99)]]]


class Invoice(BaseModel):
    """Much of the above at once."""

    model_config = ConfigDict(extra="forbid")
    number: Annotated[str, Field(pattern=r"^INV-\d{4}$")]
    issued: date
    buyer: Address
    lines: list[InvoiceLine] = Field(min_length=1, max_length=3)
    labels: set[Colour] = set()
    meta: dict[Slug, int | bool] = Field({}, max_length=2)


class InvoiceLine(BaseModel):
    model_config = ConfigDict(extra="forbid")
    article: Slug
    quantity: int = Field(ge=1, le=99)
    net: Percent


class Deprecated(BaseModel):
    old: int | None = Field(None, deprecated=True)
    text: str = Field("", description='Says "anything" \\ at all', examples=["a", "b"])
    flag: bool = True


class Defaults(BaseModel):
    sets: set[int] = {1, 2}
    colour: Colour = Colour.RED
    nested: Address | None = None
    level: Level = Level.LOW


class Schedule(BaseModel):
    days: set[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]] = Field(
        min_length=2, max_length=3
    )
    slots: list[tuple[Annotated[int, Field(ge=0, le=23)], Annotated[int, Field(ge=0, le=59)]]]


MODELS: tuple[Any, ...] = (
    *(SetOfStrings, SetOfEnum, AllOfAnEnum, FrozenSets, SetOfLiterals, SetOfTuples, ConSet),
    *(SetInUnion, Owner, NestedDiscriminators, CallableDiscriminator, Constrained, Decimals),
    *(DigitsOfDecimals, MultipleOfFloat, Tree, LinkedList, Expression, Folder, Page[int]),
    *(Page[Pet], Pair[Colour, set[int]], Pair[Address, Page[bool]], Result[Pet], Result[Tree]),
    *(ConstrainedKeys, LimitedDict, LimitedEnumDict, DictOfSets, Enums, Times, Names, Urls),
    *(EmailLike, Forbidding, Allowing, Aliases, Computed, Inherited, Tuples, Unions, AnyJson),
    *(Wrapped, RootUnion, Movie, Point, Order, Invoice, Deprecated, Defaults, Schedule),
)

# Models whose schemas say less than the model wants.
WIDER: dict[Any, str] = {
    Times: "a duration may have any number of digits",
    Urls: "any URI matches the schema's format",
    Decimals: "any string is allowed by the schema",
    DigitsOfDecimals: "the same, and numbers with more digits",
}


def cases() -> list[SchemaCase]:
    """Every model as it reads, and those with fields for writing only as they are written."""
    found = []
    for model in MODELS:
        adapter = TypeAdapter(model)
        for mode in ("validation", "serialization"):
            schema = adapter.json_schema(mode=mode)  # type: ignore[arg-type]
            if found and schema == found[-1].schema:
                continue
            is_judge = model not in WIDER and mode == "validation"
            judge = _accepted_by(adapter) if is_judge else None
            found.append(SchemaCase(f"{_name(model)}, {mode}", schema, judge))
    return found


def _name(model: Any) -> str:
    return str(getattr(model, "__name__", model))


def _accepted_by(adapter: TypeAdapter[Any]) -> Callable[[str], bool]:
    def is_accepted(text: str) -> bool:
        try:
            adapter.validate_json(text)
        except ValueError:
            return False
        return True

    return is_accepted


for _model in (NestedDiscriminators, Expression, Binary, Wrapped, Invoice, Folder, Tree):
    _model.model_rebuild()

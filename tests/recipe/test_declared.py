"""The reader of declared configuration fields, on small packages written here."""

from __future__ import annotations

import pytest

from kitbuild.recipe.declared import DeclaredField, declared_fields

PACKAGE = {
    "lib/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .config import Config as Config\n",
    "lib/config.py": """
from dataclasses import dataclass, field
from core import Base
from elsewhere import Unknown

DEFAULT = pick()

@dataclass
class Config(Base, Unknown):
    shared: ClassVar[int] = 3
    rate: float = field(default=2e-5, metadata={"help": "x"})
    layers: list[str] = field(default_factory=list)
    runtime: Runtime = field(default_factory=Runtime)
    chosen: str = DEFAULT
    pair: tuple[int, int] = (1, 2)
    many: set[int] = {1}
    needed: int

class Plain:
    size: int = 3
""",
    "core/__init__.py": "from .args import Base\n",
    "core/args.py": """
import dataclasses
@dataclasses.dataclass
class Base:
    first: bool = False
    rate: float = 5e-5
""",
}


def test_fields_are_read_with_their_types_and_defaults() -> None:
    """Literals become values, anything else stays source text, a subclass overrides in place."""
    found = declared_fields(PACKAGE.get, "lib.Config")
    assert list(found) == ["first", "rate", "layers", "runtime", "chosen", "pair", "many", "needed"]
    assert found["rate"] == DeclaredField(type="float", default=2e-05, literal=True)
    assert found["layers"] == DeclaredField(type="list[str]", default=[], literal=True)
    assert found["runtime"] == DeclaredField(type="Runtime", default="Runtime()", literal=False)
    assert found["chosen"] == DeclaredField(type="str", default="DEFAULT", literal=False)
    assert found["pair"].default == [1, 2]
    assert found["many"] == DeclaredField(type="set[int]", default="{1}", literal=False)
    assert found["needed"] == DeclaredField(type="int", default=None, literal=False, required=True)


def test_a_class_that_is_no_dataclass_declares_nothing() -> None:
    """Annotations of a plain class are no fields."""
    assert declared_fields(PACKAGE.get, "lib.config.Plain") == {}


@pytest.mark.parametrize("name", ["lib.Missing", "nowhere.Config", "lib.config.Base2"])
def test_an_absent_class_is_an_error(name: str) -> None:
    """A name that the source does not hold is said, never read as a class without fields."""
    with pytest.raises(LookupError, match=f"^'?{name} is not in the source'?$"):
        declared_fields(PACKAGE.get, name)


def test_reexports_in_a_circle_end() -> None:
    """Two modules that import a name from each other do not loop."""
    circle = {"a.py": "from b import C\n", "b.py": "from a import C\n"}
    with pytest.raises(LookupError):
        declared_fields(circle.get, "a.C")

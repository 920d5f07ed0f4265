"""What a class' constructor takes and what a module's constants are, read from the source text: nothing is imported.

A default stands in one place, the constructor's signature. `recipes.plan` reads it here, since importing the DataModule, a
callback or Lightning would take longer than the plan may.
"""

import ast
import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache
def _constructor(path: Path, class_name: str) -> ast.arguments:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return item.args
    raise ValueError(f"{path} has no class {class_name} with a constructor")


def constructor_arguments(path: Path, class_name: str) -> list[str]:
    """Return the names of the arguments of a class' `__init__`, `self` left out.

    Raises:
        ValueError: the file has no such class with an `__init__`.
    """
    arguments = _constructor(path, class_name)
    return [a.arg for a in (*arguments.args[1:], *arguments.kwonlyargs)]


def constructor_defaults(path: Path, class_name: str) -> dict[str, Any]:
    """Return argument -> default of a class' `__init__`, for defaults that are literals.

    Raises:
        ValueError: the file has no such class with an `__init__`.
    """
    arguments = _constructor(path, class_name)
    plain = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [
        *zip(plain, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    found = {}
    for argument, default in pairs:
        if default is not None:
            try:
                found[argument.arg] = ast.literal_eval(default)
            except ValueError:
                continue
    return found


def constructor_types(path: Path, class_name: str) -> dict[str, str]:
    """Return argument -> annotation of a class' `__init__`, as its source has it; arguments without one are left out.

    Raises:
        ValueError: the file has no such class with an `__init__`.
    """
    arguments = _constructor(path, class_name)
    return {
        a.arg: ast.unparse(a.annotation)
        for a in (*arguments.args[1:], *arguments.kwonlyargs)
        if a.annotation is not None
    }


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "Literal": (str,),
    "None": (type(None),),
    "list": (list, tuple),
    "tuple": (list, tuple),
    "dict": (Mapping,),
}


def accepts(annotation: str, value: Any) -> bool:
    """Return whether a value read from YAML is of an annotated type.

    Looked at are int, float, bool, str, None, Literal (as str), list, tuple and dict, and what a list holds. Other types in a
    union are left out of account, and if there is nothing else, everything is accepted.
    """
    has_plain = False
    for part in annotation.split(" | "):
        name, _, inner = part.partition("[")
        types = _PLAIN.get(name.rsplit(".", 1)[-1])
        has_plain |= types is not None
        if types is None or not isinstance(value, types) or (isinstance(value, bool) and name != "bool"):
            continue
        items = value if name == "list" and inner and isinstance(value, list | tuple) else ()
        if all(accepts(inner.removesuffix("]"), item) for item in items):
            return True
    return not has_plain


def constant(path: Path, name: str) -> Any:
    """Return the value of a module's constant.

    Raises:
        ValueError: the file assigns no literal to that name.
    """
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise ValueError(f"{path} has no constant {name}")


def trainer_arguments() -> list[str]:
    """Return what Lightning's Trainer takes.

    Raises:
        ValueError: Lightning is not installed, or its Trainer is not where it was.
    """
    spec = importlib.util.find_spec("lightning")  # finds the folder; imports nothing
    folder = Path((spec.submodule_search_locations or [""])[0]) if spec is not None else Path()
    path = folder / "pytorch" / "trainer" / "trainer.py"
    if spec is None or not path.is_file():
        raise ValueError(
            f"Lightning's Trainer is not found at {path}: pip install -e . brings the version that is tested"
        )
    return constructor_arguments(path, "Trainer")

"""The Jinja environment that chat templates run in: Hugging Face's dialect, sandboxed, on a budget."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neoserve.text import render_budget as budget

_LONGEST_DATE_FORMAT = 256
_LARGEST_INDENT = 16


class RaisedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class GenerationTag(Extension):
    """``{% generation %}``: marks an assistant's own words for training; rendering passes them through."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja's base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call whose body is the block's."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The ``dict`` that templates see: makes dicts, and has no way to anything else."""

    def __call__(self, *arguments: Any, **keywords: Any) -> dict[Any, Any]:
        return dict(*arguments, **keywords)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """As ``dict.fromkeys``."""
        return dict.fromkeys(*arguments)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no underscore names and, printed, does not print what it holds."""

    def __init__(*arguments: Any, **keywords: Any) -> None:
        self, rest = arguments[0], arguments[1:]
        attributes = dict(*rest, **keywords)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute is {name!r}; it must not start with '_'")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. There is no loader, so nothing can be included or imported."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], finalize=_weigh_output
        )
        self.filters.update({name: _bounded_filter(name, function) for name, function in self.filters.items()})
        self.filters["tojson"] = _tojson
        self.filters["_turns"] = budget.CountedLoop
        self.filters["_weighed"] = _weighed
        self.filters["_joined"] = _joined
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime(now)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def compile_template(self, text: str) -> tuple[jinja2.Template, nodes.Template]:
        """``text`` as a template ready to render, and its syntax tree before the budget was built in."""
        tree = self.parse(text)
        for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
            found = tree.find(kind)
            if found is not None:
                raise jinja2.TemplateSyntaxError(f"'{kind.__name__.lower()}' is not allowed", found.lineno)
        code = self.compile(_with_budget(self.parse(text)))
        return jinja2.Template.from_code(self, code, self.make_globals(None)), tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Every call of a template: counted, its arguments and its result weighed."""
        current = budget.current()
        current.spend()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            budget.check_counts(args, kwargs)
            if name == "replace" and len(args) >= 2:
                budget.check_replace(owner, args[0], args[1])
            elif name == "join" and args:
                args = (budget.bounded_list(args[0]), *args[1:])
                current.make(current.weigh(args[0]) + len(owner) * len(args[0]))
        result = super().call(__context, __obj, *args, **kwargs)
        current.check(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Every intercepted operator: refused before it makes something too large."""
        budget.check_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        budget.current().check(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` and ``str.format_map`` with their widths checked."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def bounded(*arguments: Any, **keywords: Any) -> str:
            budget.check_brace_format(value.__self__, arguments, keywords)
            return inner(*arguments, **keywords)

        return functools.update_wrapper(bounded, value)


def _with_budget(tree: nodes.Template) -> nodes.Template:
    """Build the budget into a syntax tree: loops are counted, literals and concatenations weighed."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, "_turns")
        if loop.recursive:
            for call in loop.find_all(nodes.Call):
                if isinstance(call.node, nodes.Name) and call.node.name == "loop" and call.args:
                    call.args[0] = _filtered(call.args[0], "_turns")
    _weigh_literals(tree)
    return tree


def _filtered(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)


def _weigh_literals(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            node_list: list[Any] = [_weighed_node(item) for item in value]
            setattr(node, field, node_list)
        else:
            setattr(node, field, _weighed_node(value))


def _weighed_node(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _weigh_literals(value)
    if isinstance(value, nodes.Concat):
        return _filtered(nodes.List(value.nodes).set_lineno(value.lineno), "_joined")
    if isinstance(value, (nodes.List, nodes.Dict)) or (isinstance(value, nodes.Tuple) and value.ctx == "load"):
        return _filtered(value, "_weighed")
    return value


def _weighed(value: Any) -> Any:
    budget.current().check(value)
    return value


def _joined(parts: list[Any]) -> str:
    current = budget.current()
    current.spend()
    current.make(current.weigh(parts))
    return "".join(map(str, parts))


def _weigh_output(value: Any) -> Any:
    current = budget.current()
    current.make(current.weigh(value))
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its arguments checked and its result weighed. The piped value is the first argument."""
    context_arguments = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*arguments: Any, **keywords: Any) -> Any:
        current = budget.current()
        current.spend()
        context, (value, *rest) = arguments[:context_arguments], arguments[context_arguments:]
        budget.check_counts([] if name in ("default", "d") else rest, {} if name in ("default", "d") else keywords)
        value = _checked_input(name, value, rest, keywords)
        result = function(*context, value, *rest, **keywords)
        current.check(result)
        return result

    return bounded


def _checked_input(name: str, value: Any, rest: list[Any], keywords: dict[str, Any]) -> Any:
    current = budget.current()
    if name == "join":
        value = budget.bounded_list(value)
        separator = rest[0] if rest else keywords.get("d", "")
        current.make(current.weigh(value) + current.weigh(separator) * len(value))
    elif name == "replace" and len(rest) >= 2:
        budget.check_replace(value, rest[0], rest[1])
    elif name == "format":
        budget.check_percent_format(str(value), [*rest, keywords])
    elif name == "indent" and isinstance(value, str):
        width = rest[0] if rest else keywords.get("width", 4)
        current.make(len(value) + (value.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
    elif name == "wordwrap" and isinstance(value, str):
        breaks = [len(item) for item in (*rest, *keywords.values()) if isinstance(item, str)]
        current.make(len(value) * (1 + max([1, *breaks])))
    elif name in ("string", "pprint", "e", "escape", "forceescape", "urlencode", "urlize"):
        current.make(current.weigh(value))
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's ``tojson``: plain JSON, without Jinja's HTML escapes."""
    current = budget.current()
    current.spend()
    current.make(current.weigh(value))
    if indent is not None and (not isinstance(indent, int) or indent > _LARGEST_INDENT):
        raise budget.BudgetError(f"tojson's indent is {indent!r}; it must be an integer of at most {_LARGEST_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts = []
    for part in encoder.iterencode(value):
        current.make(len(part))
        parts.append(part)
    return "".join(parts)


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:  # noqa: A002  # the name that templates know
        if len(format) > _LONGEST_DATE_FORMAT:
            raise budget.BudgetError(f"strftime_now's format has more than {_LONGEST_DATE_FORMAT} characters")
        return now().strftime(format)

    return strftime_now


@contextmanager
def spending(limits: budget.RenderLimits, inputs: object) -> Iterator[None]:
    """The body renders within ``limits``."""
    with budget.Spending(budget.Budget(limits, inputs)):
        yield

"""Reports errors that leave a model or a backward pass, and errors that the script catches.

A script may catch an error on one rank and leave the others in a collective.
"""

import ast
import builtins
import functools
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from accel_fsdp.errors import in_a_line
from accel_fsdp.library_internals import Internal
from accel_fsdp.ranks import events, script
from accel_fsdp.ranks.observing import Observation

MOST = 8
"""The most errors that are reported, also of each handler: it may catch one in each step."""
CAUGHT = "__accel_fsdp_caught__"
"""The name among the builtins that the script's handlers call."""
ERRORS = Observation(
    "errors that a script catches", Internal("torch.nn:Module.__call__"), Internal("torch.distributed.fsdp:FSDPModule")
)
RELIES_ON = ERRORS.relies_on


class ObservedErrors:
    """Reports errors that leave the outermost call; without an error it costs a few nanoseconds per FSDP unit."""

    def __init__(self) -> None:
        self.depth = self.reported = 0

    def install(self) -> None:
        import torch
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
        from torch.nn.parallel import DistributedDataParallel

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.nn.Module.__call__(module, *args, **kwargs)  # looked up late: the recorder replaces it

        self._watch(torch.Tensor, "backward", torch.Tensor.backward)
        for wrapper in (FullyShardedDataParallel, DistributedDataParallel, FSDPModule):
            self._watch(wrapper, "__call__", call)

    def _watch(self, owner: Any, name: str, original: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if self.depth == 1 and self.reported < MOST:
                    self.reported += 1
                    line = script.line_of_stack(sys._getframe(1))
                    events.report("raised", error=in_a_line(error), line=line)
                raise
            finally:
                self.depth -= 1

        setattr(owner, name, watched)


def chain(error: BaseException) -> Iterator[str]:
    """An error and its causes, one per line."""
    seen: BaseException | None = error
    while seen is not None:
        yield in_a_line(seen)
        seen = seen.__cause__ or seen.__context__


def code_of(source: bytes, path: str) -> CodeType:
    """Compiles a script whose handlers report the errors that they catch. All its lines keep their numbers."""
    counts: Counter[tuple[CodeType, int]] = Counter()

    def report_caught() -> None:
        error, frame = sys.exc_info()[1], sys._getframe(1)
        handler = (frame.f_code, frame.f_lineno)
        counts[handler] += 1
        if error is not None and counts[handler] <= MOST:  # a stack takes long, and a handler may catch in a hot loop
            stack = traceback.extract_stack(frame)
            lines = [script.line_of([(at.filename, at.lineno)]) for at in stack if script.is_own(at.filename)]
            events.report("caught", error=in_a_line(error), line=script.line_of_error(error) or lines[-1], lines=lines)

    vars(builtins)[CAUGHT] = report_caught
    return compile(_Reporting().visit(ast.parse(source, path)), path, "exec", dont_inherit=True)


class _Reporting(ast.NodeTransformer):
    """Adds a call to the beginning of each handler."""

    def visit_ExceptHandler(self, handler: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(handler)
        call = ast.Expr(ast.Call(ast.Name(CAUGHT, ast.Load()), [], []))
        handler.body.insert(0, ast.fix_missing_locations(ast.copy_location(call, handler)))
        return handler

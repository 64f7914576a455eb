"""The linter's rules, as rows of a table, with the engine that runs them."""

from accel_fsdp.linter.rules import arguments, engine, fsdp, keys, launch, mesh, model, script, values
from accel_fsdp.linter.rules.engine import RULES, Finding, Rule, Severity, locate, run
from accel_fsdp.linter.rules.keys import SECTIONS
from accel_fsdp.linter.rules.subject import ScriptFacts, Subject

engine.add(*keys.ROWS, *values.ROWS, *fsdp.ROWS, *mesh.ROWS, *launch.ROWS, *model.ROWS, *arguments.ROWS, *script.ROWS)

__all__ = ["RULES", "SECTIONS", "Finding", "Rule", "ScriptFacts", "Severity", "Subject", "locate", "run"]

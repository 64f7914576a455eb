from .command import write as write
from .flags import ScriptCommand as ScriptCommand

from .changes import Migration as Migration
from .command import Options as Options
from .command import migrate as migrate
from .translate import TARGETS as TARGETS
from .translate import plan as plan

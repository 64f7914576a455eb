from .changes import Change as Change
from .changes import Migration as Migration
from .command import MigrateOptions as MigrateOptions
from .command import drawn_up as drawn_up
from .command import migrate as migrate
from .translate import plan as plan

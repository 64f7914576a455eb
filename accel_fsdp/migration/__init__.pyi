from .changes import Change as Change
from .changes import Migration as Migration
from .command import drawn_up as drawn_up
from .command import migrate as migrate
from .flags import MigrateCommand as MigrateCommand
from .translate import plan as plan

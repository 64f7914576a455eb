from . import launcher as launcher
from . import place as place
from .flags import LaunchCommand as LaunchCommand

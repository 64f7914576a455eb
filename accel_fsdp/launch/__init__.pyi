from . import launcher as launcher
from .flags import LaunchCommand as LaunchCommand

from . import launcher as launcher
from . import place as place
from . import rendezvous as rendezvous
from .flags import LaunchCommand as LaunchCommand
from .flags import PlaceFlags as PlaceFlags
from .store import Address as Address
from .store import Board as Board

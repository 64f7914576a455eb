from . import agreement as agreement
from . import child_process as child_process
from . import launcher as launcher
from . import place as place
from . import python_child as python_child
from .flags import LaunchCommand as LaunchCommand
from .flags import PlaceFlags as PlaceFlags

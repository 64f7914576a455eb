from . import holding as holding
from .events import EVENTS as EVENTS
from .events import Event as Event
from .events import read as read
from .holding import Holding as Holding
from .holding import Unit as Unit
from .holding import holdings as holdings
from .holding import measure as measure

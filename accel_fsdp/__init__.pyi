from .api import check as check
from .api import compare as compare
from .api import export as export
from .api import migrate as migrate
from .api import plan as plan
from .api import to_yaml as to_yaml
from .errors import UserError as UserError
from .ranks import cpu as cpu
from .training import Checkpoints as Checkpoints
from .training import HangTimeout as HangTimeout

__version__: str

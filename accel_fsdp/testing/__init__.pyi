from .ranks import RankError as RankError
from .ranks import Ranks as Ranks
from .ranks import fsdp_ranks as fsdp_ranks

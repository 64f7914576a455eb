"""One training job: how it trains, how its ranks share the model, and what can't be combined."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

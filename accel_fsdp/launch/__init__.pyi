from . import launcher as launcher

from .command import ConvertCommand as ConvertCommand
from .command import convert as convert

"""`python .../accel_fsdp/ranks/__main__.py SCRIPT` runs a script as one rank, and FSDP on gloo without a GPU.

The script is not edited. Torch's launcher starts this file by its path: with `-m` Python would look for this package
in the current folder first.
"""

import os
import sys

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]
    sys.path.append(os.path.abspath(os.path.join(__file__, *[os.pardir] * 3)))

from accel_fsdp.ranks import on_cpu

on_cpu.run()

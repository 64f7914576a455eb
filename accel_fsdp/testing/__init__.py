"""Ranks of FSDP on the CPU for tests: started once, so that a test costs milliseconds.

In conftest.py: `pytest_plugins = ["accel_fsdp.testing"]`. Then a test calls a function on every rank:

    def elements(scale):
        model = fully_shard(nn.Linear(8, 8))
        return scale * sum(p.to_local().numel() for p in model.parameters())

    def test_each_rank_holds_half(fsdp_ranks):
        assert fsdp_ranks(elements, 1) == [36, 36]
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

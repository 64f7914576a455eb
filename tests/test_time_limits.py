"""Time limits end a block, also inside one another."""

import time

import pytest

from accel_fsdp.time_limits import at_most


@pytest.mark.parametrize(("inner", "slept"), [(0.05, 0.0), (0.05, 0.1), (60, 0.0), (60, 5)])
def test_an_inner_limit_leaves_the_outer_one_in_force(inner: float, slept: float) -> None:
    """Whether the inner block ends in time, is ended, or has more time than the outer one."""

    def work() -> None:
        try:
            with at_most(inner):
                time.sleep(slept)
        except TimeoutError as error:
            if "more than 0.05 s" not in str(error):
                raise
        time.sleep(1)

    with pytest.raises(TimeoutError, match=r"more than 0\.2 s"), at_most(0.2):
        work()


def test_without_an_outer_limit_none_is_left() -> None:
    with pytest.raises(TimeoutError), at_most(0.05):
        time.sleep(1)
    time.sleep(0.1)

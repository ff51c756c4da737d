"""Page sizes and pools at which the components of a setup work."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvgraft.errors import ConfigError, PluginError, PluginHookError
from kvgraft.tree.keys import TokenKey
from kvgraft_testing.machine.judging import as_violation
from kvgraft_testing.machine.setups import Setup, engine_for, open_cache
from kvgraft_testing.machine.sizes import Sizes

__all__ = ["LARGER_PAGES", "SCALES", "fitting_sizes", "opens", "quiet_log"]

LARGER_PAGES = (8, 16, 32, 64, 128)
"""Page sizes tried if the setup's own are all refused."""

SCALES = (1, 2, 4, 8, 16, 32, 64)
"""Factors by which pools are enlarged until a short request is admitted."""

SMALLEST = Sizes(device=9, host=9)


def fitting_sizes(setup: Setup) -> dict[int, int]:
    """By how many times pools are enlarged, per page size the components accept.

    Raises:
        ConfigError: the components refuse every page size; the first reason is given.
        PluginError: a component refuses its options.
        ContractViolation: a component raises another error when it is built (P7).
    """
    refusals: list[ConfigError | PluginError] = []
    for page_sizes in (setup.page_sizes, *((larger,) for larger in LARGER_PAGES)):
        fitting: dict[int, int] = {}
        for page_size in page_sizes:
            scale = _scale(setup, page_size, refusals)
            if scale is not None:
                fitting[page_size] = scale
        if fitting:
            return fitting
    raise refusals[0]


def opens(setup: Setup, fitting: Mapping[int, int]) -> bool:
    """Whether caches of a setup can be opened at the sizes of a plainer setup.

    Tenants need pools of some slots each, and a shared budget needs several pools.
    """
    for page_size, scale in fitting.items():
        sizes = Sizes(page_size, device=9 * scale, host=9 * scale)
        try:
            with quiet_log():
                cache = open_cache(setup, sizes, engine_for(setup.device))
        except ConfigError:
            return False
        cache.close()
        if cache.arenas is not None and not cache.arenas.by_tier:
            return False
    return True


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keep the core's log quiet: its messages are findings here."""
    logger, handler = logging.getLogger("kvgraft"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _scale(setup: Setup, page_size: int, refusals: list[ConfigError | PluginError]) -> int | None:
    """The smallest scale at which a short request is admitted, or else a cache can be opened."""
    opened: int | None = None
    for scale in SCALES:
        sizes = Sizes(page_size, device=9 * scale, host=9 * scale)
        try:
            cache = open_cache(setup, sizes, engine_for(setup.device))
        except PluginHookError as error:
            raise as_violation(error, "open") from error
        except (ConfigError, PluginError) as error:
            refusals.append(error)
            continue
        opened = opened or scale
        try:
            request = cache.begin(TokenKey((1,) * page_size), reserve=1)
            if cache.admit(request).admitted:
                return scale
        except Exception as error:
            raise as_violation(error, "begin and admit") from error
    return opened

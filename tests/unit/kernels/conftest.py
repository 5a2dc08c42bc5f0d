from tests.support.slow_search import codes_of, pairs, slow

__all__ = ["codes_of", "pairs", "slow"]

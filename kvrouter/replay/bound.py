"""What one big cache would reuse: no placement can do better but by luck of eviction order."""

from kvrouter.prompt import Prompt
from kvrouter.replay.fleet import Progress
from kvrouter.replay.trace import Trace
from kvrouter.sim.cache import PrefixCache


def pooled_bound(
    trace: Trace, *, total_blocks: int, block_size: int, progress: Progress = lambda _: None
) -> float:
    """The share of prompt tokens that one cache of the fleet's total size has, 0 to 1.

    Requests run one after the other there, and their outputs take their place in it too.
    """
    cache = PrefixCache(total_blocks + 1)
    reused = total = 0
    for number, request in enumerate(trace.requests):
        progress(number)
        prompt = Prompt(trace.prompt(number) + trace.output(number)[:-1])
        names = list(memoryview(prompt.hashes(block_size)).cast("Q"))
        hit = cache.leading(names[: (request.prompt_tokens - 1) // block_size])
        cache.hold(hit)
        taken, _ = cache.take(min(-(-len(prompt.token_ids) // block_size) - len(hit), cache.free))
        blocks = hit + taken
        for block, name in list(zip(blocks, names, strict=False))[len(hit) :]:
            cache.name(block, name)
        cache.release(blocks)
        reused += len(hit) * block_size
        total += request.prompt_tokens
    return reused / total

"""All-reduce, reduce-scatter, all-gather, broadcast and barrier as coroutines over endpoints."""

"""What ends a run without a result, and is no failure."""


class ShardDoneError(Exception):
    """This shard has measured its share of the pieces `what`, and other shards have not: there is nothing to go on with yet."""

    def __init__(self, what: str, index: int, count: int):
        super().__init__(
            f"{what}: shard {index} of {count} has done its share; the rest is for the other shards, and the same command then "
            "goes on"
        )

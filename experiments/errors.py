"""What ends a run without a result, and is no failure."""


class ShardDoneError(Exception):
    """This shard has measured its share, and other shards have not: there is nothing to go on with yet."""

"""Keeps the objects of one watch as they are, for rounds that read them whole."""

from valve_kube.client import Json
from valve_kube.reflector import Sink

Key = tuple[str, str]


class Store:
    """Objects of one kind as they are, by namespace and name."""

    def __init__(self) -> None:
        self.items: dict[Key, Json] = {}

    def tee(self, inner: Sink) -> Sink:
        """Keep the raw objects of a view beside what it does with them."""

        def replace(items: list[Json]) -> None:
            self.items = {key_of(item): item for item in items}
            inner.replace(items)

        def put(item: Json) -> None:
            self.items[key_of(item)] = item
            inner.put(item)

        def drop(item: Json) -> None:
            self.items.pop(key_of(item), None)
            inner.drop(item)

        return Sink(replace=replace, put=put, drop=drop)


def key_of(item: Json) -> Key:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]

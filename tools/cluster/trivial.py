"""An extender that decides nothing: every node passes, scores are drawn, bind posts one annotated Binding.

What kube-scheduler, API server and wire can do at most on a machine; the bench runs it beside Valve's for comparison
(`python -m valve_tools.cluster.trivial PORT KUBECONFIG`)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
from valve_kube import names
from valve_kube.access import from_kubeconfig
from valve_kube.client import KubeClient
from valve_scheduler.server import Answer, json_answer, serve


async def main(port: int, kubeconfig: str) -> None:
    client = KubeClient(from_kubeconfig(kubeconfig))

    async def answer(_: str, path: str, body: bytes) -> Answer:
        arguments: dict[str, Any] = msgspec.json.decode(body)
        if path.endswith("/filter"):
            return json_answer({"NodeNames": arguments["NodeNames"][:64], "Error": ""})
        if path.endswith("/prioritize"):
            return json_answer([{"Host": name, "Score": hash(name) % 11} for name in arguments["NodeNames"]])
        path, binding = _binding(arguments)
        await client.request("POST", path, body=binding)
        return json_answer({"Error": ""})

    async with await serve(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


def _binding(arguments: dict[str, Any]) -> tuple[str, Any]:
    namespace, name = arguments["PodNamespace"], arguments["PodName"]
    metadata = {"namespace": namespace, "name": name, "annotations": {names.GPUS: "GPU-any"}}
    target = {"apiVersion": "v1", "kind": "Node", "name": arguments["Node"]}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}

    return f"/api/v1/namespaces/{namespace}/pods/{name}/binding", body


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))

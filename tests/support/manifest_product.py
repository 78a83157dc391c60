"""Checks of the manifests against the product: configuration, ports, sizes, commands, keys, times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from manifest_model import Object, Pod, Rendered

from disagg.core.config.read import Config, load_config

RAY_DRAIN_S = 30
SHARED_END_S = 30
"""Time that routers have for their answers when nodes stop at the same time, with the whole deployment."""
"""How long a Ray node that is asked to stop lets what runs on it finish."""
CONFIG_PATH = "/etc/disagg/disagg.toml"


def load(rendered: Rendered, folder: Path) -> Config:
    """The mounted file, through the product's own loader. Raises `ConfigError`."""
    path = folder / "disagg.toml"
    path.write_text(rendered.toml)
    return load_config(path)


def check_sizes(rendered: Rendered) -> Iterator[str]:
    """A pod for each group, with as many GPUs (or CPUs) as it has ranks; prefill, placed first, fits nowhere else."""
    [cluster] = rendered.of("RayCluster")
    sizes = {role: rendered.settings[role] for role in ("prefill", "decode")}
    ranks = {role: (one.get("groups", 1), one["tp"]) for role, one in sizes.items()}
    places = {
        one["groupName"]: (one["replicas"], _places(one)) for one in cluster["spec"]["workerGroupSpecs"]
    }
    wanted = {"both": (1, sum(number * tp for number, tp in ranks.values()))} if "both" in places else ranks
    if places != wanted:
        yield f"sizes: pods and places are {places}, the configuration says {wanted}"
    if "both" not in places and ranks["prefill"][1] < ranks["decode"][1]:
        yield "sizes: a prefill group is smaller than a decode group and may be placed on its pod"
    if cluster["spec"]["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield "sizes: Ray may place a rank on the head"
    for group in cluster["spec"]["workerGroupSpecs"]:
        if not group["replicas"] == group["minReplicas"] == group["maxReplicas"]:
            yield f"sizes: the number of pods of {group['groupName']} may change"


def _places(group: Object) -> int:
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = limits.get("nvidia.com/gpu")
    return int(gpus if gpus is not None else group["rayStartParams"]["num-cpus"])


def check_devices(rendered: Rendered) -> Iterator[str]:
    """Ranks get the device that their pods have."""
    for pod in rendered.component("node"):
        device = "cuda" if "nvidia.com/gpu" in pod.main["resources"]["limits"] else "cpu"
        for role in ("prefill", "decode"):
            if rendered.settings[role]["device"] != device:
                yield f"devices: {role}.device is not {device}, which {pod.name} has"


def check_ports(rendered: Rendered) -> Iterator[str]:
    """Ports of the configuration, of containers, Services and commands are the same."""
    control = rendered.settings["control"]
    [head], [router] = rendered.component("head"), rendered.component("router")
    flags = _flags(router.main["args"])
    join = urlsplit(flags["--join"])
    try:
        directory = rendered.one("Service", join.hostname or "")["spec"]
        served = [port["port"] for port in directory["ports"]]
        if [*served, join.port] != [control["directory_port"]] * 2:
            yield f"ports: routers join {join.netloc}, the configuration says {control['directory_port']}"
        if not all(head.labels.get(key) == value for key, value in directory["selector"].items()):
            yield "ports: routers join a Service that is not the head's"
    except KeyError as exc:
        yield f"ports: routers join {join.netloc}: {exc}"
    for pod, name, port in (
        (head, "directory", control["directory_port"]),
        (router, "control", control["router_port"]),
        (router, "http", int(flags["--port"])),
    ):
        found = [one["containerPort"] for one in pod.main["ports"] if one["name"] == name]
        if found != [port]:
            yield f"ports: {pod.name} has {name} at {found}, not at {port}"
    [launch] = rendered.component("launch")
    jobs = urlsplit(_environment(launch).get("RAY_API_SERVER_ADDRESS", ""))
    known = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in rendered.of("Service")}
    if known.get(jobs.hostname or "") != jobs.port:
        yield f"ports: jobs are submitted to {jobs.netloc}, which no Service offers"


def check_files(rendered: Rendered) -> Iterator[str]:
    """Files that commands and configuration name are mounted; the key file follows its Secret, for the pod alone."""
    key_file = rendered.settings["control"]["key_file"]
    for pod in (*rendered.component("head"), *rendered.component("router")):
        paths = [CONFIG_PATH, key_file]
        if pod.component == "router":
            flags = _flags(pod.main["args"])
            paths += [flags["--api-key-file"], flags["--config"]]
        mounts = [one["mountPath"] for one in pod.main["volumeMounts"]]
        for path in paths:
            if str(Path(path).parent) not in mounts:
                yield f"files: {pod.name} has nothing mounted at {path}"
        yield from _check_key_file(pod, Path(key_file))
    if rendered.settings["control"].get("host") != "auto":
        yield "files: a pod does not listen on its own address: control.host is not auto"


def _check_key_file(pod: Pod, key_file: Path) -> Iterator[str]:
    """Kubernetes updates a mounted folder, but no `subPath`; `disagg` refuses a file that others can read."""
    for mount in pod.main["volumeMounts"]:
        if mount["mountPath"] == str(key_file.parent):
            [volume] = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]]
            if "subPath" in mount or "secret" not in volume:
                yield f"files: {pod.name} does not follow the Secret of {key_file}"
            elif volume["secret"].get("defaultMode", 0o644) & 0o037:
                yield f"files: {pod.name} lets others read {key_file}"
    if not pod.spec["securityContext"].get("runAsNonRoot"):
        yield f"files: {pod.name} runs as root, who may read {key_file} with mode 0600 only"


def check_tokens(rendered: Rendered) -> Iterator[str]:
    """Ray asks for a token, the same Secret's everywhere."""
    [cluster] = rendered.of("RayCluster")
    auth = cluster["spec"].get("authOptions", {})
    if auth.get("mode") != "token":
        yield "tokens: authOptions.mode is not token"
    for pod in (one for one in rendered.pods() if one.component != "router"):
        given = _environment(pod)
        if given.get("RAY_AUTH_MODE") != "token" or given.get("RAY_AUTH_TOKEN") != auth.get("secretName"):
            yield f"tokens: {pod.name} does not use Ray's token"


def check_references(rendered: Rendered, documented: str) -> Iterator[str]:
    """ConfigMaps that are mounted are there; Secrets and claims are in `documented`, with their keys."""
    maps = {one["metadata"]["name"] for one in rendered.of("ConfigMap")}
    for pod in rendered.pods():
        for volume in pod.spec["volumes"]:
            if volume.get("configMap", {}).get("name", next(iter(maps))) not in maps:
                yield f"references: {pod.name} mounts a ConfigMap that is not there"
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and f"PersistentVolumeClaim `{claim}`" not in documented:
                yield f"references: nothing says how to make the claim {claim}"
        for secret in _secrets(pod):
            made = re.search(rf"create secret generic {secret} --from-file=(\S+)", documented)
            if made is None:
                yield f"references: nothing says how to make the Secret {secret}"
            elif made[1] not in _keys(pod, rendered.settings["control"]["key_file"]):
                yield f"references: {pod.name} does not use key {made[1]} of the Secret {secret}"
    if rendered.of("Secret"):
        yield "references: a Secret is among the manifests"


def _secrets(pod: Pod) -> set[str]:
    mounted = {one["secret"]["secretName"] for one in pod.spec["volumes"] if "secret" in one}
    return mounted | {str(name) for key, name in _environment(pod).items() if key == "RAY_AUTH_TOKEN"}


def _keys(pod: Pod, key_file: str) -> set[str]:
    """Keys of Secrets: those of variables, and the names of files under /secrets in commands and configuration."""
    sources = [one["valueFrom"]["secretKeyRef"]["key"] for one in pod.main["env"] if "valueFrom" in one]
    words = [word for one in pod.containers() for word in (*one.get("command", ()), *one.get("args", ()))]
    return {*sources, *(Path(word).name for word in (*words, key_file) if "/secrets/" in word)}


def check_times(rendered: Rendered) -> Iterator[str]:
    """A process that is asked to stop can finish its work; a replaced router has as long as an answer may take."""
    settings = rendered.settings["api"]
    api, transfer = settings["drain_timeout_s"], rendered.settings["transfer"]["drain_timeout_s"]
    [router] = rendered.component("router")
    if api < settings["request_timeout_s"]:
        yield f"times: {router.name} aborts answers that may take longer than its drain"
    if _grace(router) <= _pause(router) + api + transfer:
        yield f"times: {router.name} is killed before its drain is over"
    for pod in (*rendered.component("head"), *rendered.component("node")):
        if _pause(pod) < _pause(router) + SHARED_END_S:
            yield f"times: {pod.name} stops before routers have finished their answers"
        if _grace(pod) <= _pause(pod) + RAY_DRAIN_S + transfer:
            yield f"times: {pod.name} is killed before its drain is over"


def _grace(pod: Pod) -> Decimal:
    return Decimal(pod.spec["terminationGracePeriodSeconds"])


def _pause(pod: Pod) -> int:
    return int(pod.main.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])[1])


def check_disruption(rendered: Rendered) -> Iterator[str]:
    """No pod of a group may be evicted; of the routers all but one."""
    [scaler] = [one["spec"] for one in rendered.of("HorizontalPodAutoscaler")]
    budgets = [one["spec"] for one in rendered.of("PodDisruptionBudget")]
    for pod in (one for one in rendered.pods() if one.component != "launch"):
        kept = [
            one.get("minAvailable")
            for one in budgets
            if all(pod.labels.get(key) == value for key, value in one["selector"]["matchLabels"].items())
        ]
        if len(kept) != 1:
            yield f"disruption: {pod.name} has {len(kept)} budgets"
        elif pod.replicas is not None and kept != [pod.replicas]:
            yield f"disruption: {pod.name}'s budget keeps {kept[0]} of {pod.replicas}"
        elif pod.replicas is None and kept[0] >= scaler["minReplicas"]:
            yield f"disruption: {pod.name}'s budget blocks every eviction"


def check_versions(rendered: Rendered, pyproject: str) -> Iterator[str]:
    """KubeRay gets the version of Ray that the image holds."""
    [cluster] = rendered.of("RayCluster")
    pinned = re.findall(r'"ray==([\d.]+)"', pyproject)
    if [cluster["spec"]["rayVersion"]] != pinned:
        yield f"versions: rayVersion {cluster['spec']['rayVersion']}, the project pins {pinned}"


def _flags(arguments: list[str]) -> dict[str, str]:
    return dict(one.split("=", 1) for one in arguments)


def _environment(pod: Pod) -> dict[str, Any]:
    """Names to values, or to names of Secrets."""
    return {
        one["name"]: one["value"] if "value" in one else one["valueFrom"]["secretKeyRef"]["name"]
        for one in pod.main["env"]
    }

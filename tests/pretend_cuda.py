"""A pretend CUDA device, for tests of device handling on machines without a GPU.

::

    with pretend_cuda() as device:
        x = torch.zeros(4, device="cuda")       # x.device is cuda:0, x.is_cuda is True
        x + torch.zeros(4)                      # refused, as on a GPU: two devices
        x.numpy()                               # refused, as on a GPU
        x[0].item()                             # works, and is counted as a wait of the host
    assert device.syncs == {("item", "tests/test_mine.py:7"): 1}

Tensors are a subclass that wraps a CPU tensor; every operation arrives at ``PretendCuda.run`` as the ATen operation
that a GPU would run. Results are those of the CPU. Launches of Warp are checked to go to torch's current stream. What
it does not pretend: kernels, memory limits, concurrency and ``backward()`` (torch's engine needs a real accelerator).
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda:0")
_ROOT = Path(__file__).resolve().parent.parent
_HERE = str(Path(__file__).resolve())
_COPIES = {"copy_", "_to_copy"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_SYNCS = {
    "_local_scalar_dense": "item",
    "_unique2": "unique",
    "bincount": "bincount",
    "equal": "equal",
    "masked_select": "masked_select",
    "nonzero": "nonzero",
    "unique_consecutive": "unique",
    "unique_dim": "unique",
}
"""Operations whose result, or its size, the host waits for."""
_DEVICE_ADDRESS = 1 << 62
"""Set in every ``data_ptr()``: addresses can be compared, and reading one on the host is a fault, as on a GPU."""

Place = str
"""``path:line`` below the project of the innermost line of headrace, else of the test."""


class PretendCuda:
    """What was done to the tensors of the device. Counters are keyed by place, or by (operation, place)."""

    def __init__(self) -> None:
        self.syncs: Counter[tuple[str, Place]] = Counter()
        """The host waited for the device; copies to the host are in ``to_host`` only."""
        self.to_host: Counter[Place] = Counter()
        """Copies of a device tensor into a host tensor; each is a wait, too."""
        self.to_device: Counter[Place] = Counter()
        """Copies of host memory to the device, Python numbers and lists of ``torch.tensor`` included."""
        self.blocking: Counter[Place] = Counter()
        """Those for which the host waits, as torch does unless they are ``non_blocking`` and from pinned memory."""
        self.launches: Counter[str] = Counter()
        """What Warp launched, by name; a captured graph counts as one."""
        self.off_stream: Counter[tuple[str, Place]] = Counter()
        """Launches of Warp on another stream than torch's current one: races on a GPU."""
        self.stream = _Stream(0)
        """``torch.cuda.current_stream()``; assign another to move there, as ``torch.cuda.stream`` does."""
        self.warp_stream: _Stream | None = None
        self.capturing = False
        self.operations: Counter[str] = Counter()
        """ATen operations on tensors of the device: the upper bound of kernel launches."""
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        """Of the copies above, but for single numbers, which become arguments of kernels."""
        self.allocated = 0
        """Bytes of device memory that operations made anew, whether or not it lives on."""

    @property
    def waits(self) -> int:
        """How often the host waited: ``syncs``, ``to_host`` and ``blocking`` together."""
        return self.syncs.total() + self.to_host.total() + self.blocking.total()

    def clear(self) -> None:
        """Count from zero again, for example after a warm-up."""
        counters = self.syncs, self.to_host, self.to_device, self.blocking, self.operations, self.launches
        for counter in (*counters, self.off_stream):
            counter.clear()
        self.allocated = self.bytes_to_host = self.bytes_to_device = 0

    def synchronize(self, device: object = None) -> None:
        """``torch.cuda.synchronize``."""
        self.syncs["synchronize", _place()] += 1

    def current_stream(self, device: object = None) -> _Stream:
        """``torch.cuda.current_stream``."""
        return self.stream

    def launch(self, name: str, stream: _Stream | None = None) -> None:
        """Warp launches something now."""
        if self.capturing:
            return
        self.launches[name] += 1
        if (stream or self.warp_stream) is not self.stream:
            self.off_stream[name, _place()] += 1

    def run(self, operation: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """One ATen operation, on the wrapped CPU tensors."""
        name: str = operation.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
        wanted = options.get("device")
        to_device = bool(ours) if wanted is None else torch.device(wanted).type == "cuda"
        if ours or to_device:
            self.operations[name] += 1
            self._count(name, arguments, options, to_device=to_device)
            if name not in _COPIES:
                _refuse_mixed(name, arguments, [tensor for tensor in tensors if not isinstance(tensor, PretendTensor)])
        given = {key: _host(value) for key, value in options.items()}
        if to_device or wanted is not None:
            given |= {"device": torch.device("cpu")} if "device" in given else {}
            given |= {"pin_memory": False} if "pin_memory" in given else {}
        result = operation(*tree_map(_host, list(arguments)), **given)
        for tensor in ours:
            if tensor.shape != tensor.host.shape:
                raise NotImplementedError(f"pretend CUDA: {name} changes the shape of a tensor in place")
        if not to_device and name != "copy_":
            return result
        known = {id(tensor.host): tensor for tensor in ours}  # an in-place result is the tensor that came in
        storages = {tensor.host.untyped_storage().data_ptr() for tensor in ours}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in storages:
                self.allocated += leaf.nbytes
        return tree_map(lambda leaf: self._wrap(leaf, known), result)

    def _wrap(self, leaf: Any, known: dict[int, PretendTensor]) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, PretendTensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else PretendTensor(leaf, self)

    def _count(self, name: str, arguments: Sequence[Any], options: dict[str, Any], *, to_device: bool) -> None:
        place = _place()
        if name in _SYNCS:
            self.syncs[_SYNCS[name], place] += 1
        elif name == "repeat_interleave" and isinstance(arguments[0], PretendTensor):
            self.syncs["repeat_interleave", place] += 1
        elif name in _INDEXING:
            for index in arguments[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self.syncs["boolean index", place] += 1
                elif index is not None and not isinstance(index, PretendTensor):
                    self.to_device[place] += 1
                    self.blocking[place] += 1
        elif name == "copy_":
            target, source = arguments[0], arguments[1]
            patient = not (len(arguments) > 2 and arguments[2])
            self._count_copy(source, isinstance(target, PretendTensor), patient, place)
        elif name == "_to_copy":
            self._count_copy(arguments[0], to_device, not options.get("non_blocking"), place)

    def _count_copy(self, source: torch.Tensor, to_device: bool, patient: bool, place: Place) -> None:
        from_device = isinstance(source, PretendTensor)
        if from_device and not to_device:
            self.to_host[place] += 1
            self.bytes_to_host += source.nbytes
        elif to_device and not from_device:
            self.to_device[place] += 1
            self.bytes_to_device += source.nbytes if source.dim() else 0
            # a number becomes an argument of a kernel
            if source.dim() and (patient or not getattr(source, "pretend_pinned", False)):
                self.blocking[place] += 1


class PretendTensor(torch.Tensor):
    """A tensor of the pretend device; ``host`` is the CPU tensor that holds its values."""

    host: torch.Tensor
    pretend: PretendCuda
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, pretend: PretendCuda) -> PretendTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CUDA
        )
        made.host, made.pretend = host, pretend
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations after the block of ``pretend_cuda`` has ended."""
        (first, *_) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PretendTensor))
        return first.pretend.run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{self.host!r} on cuda:0 (pretended)"

    __format__ = torch.Tensor.__format__


class _Dispatch(TorchDispatchMode):
    """Sees every ATen operation, also those that make tensors."""

    def __init__(self, pretend: PretendCuda) -> None:
        super().__init__()
        self._pretend = pretend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._pretend.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What torch does before it comes to an ATen operation, or without one."""

    def __init__(self, pretend: PretendCuda) -> None:
        super().__init__()
        self._pretend = pretend

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        options = {key: _with_index(value) for key, value in (kwargs or {}).items()}
        if name in _METHODS and args and isinstance(args[0], PretendTensor):
            return _METHODS[name](args[0], self._pretend)
        if name == "cuda":
            return args[0].to(CUDA)
        if name == "pin_memory":
            pinned = args[0].clone()
            pinned.pretend_pinned = True
            return pinned
        if name == "to":
            args = tuple(_with_index(argument) for argument in args)
        if options.get("pin_memory"):
            options["pin_memory"] = False  # no allocator for it here; values are the same
        return func(*args, **options)


def _tolist(tensor: PretendTensor, pretend: PretendCuda) -> Any:
    pretend.to_host[_place()] += 1
    return tensor.host.tolist()


def _numpy(tensor: PretendTensor, pretend: PretendCuda) -> Any:
    raise TypeError(
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


_METHODS: dict[str, Callable[[PretendTensor, PretendCuda], Any]] = {
    "tolist": _tolist,
    "numpy": _numpy,
    "__array__": _numpy,
    "data_ptr": lambda tensor, _: tensor.host.data_ptr() | _DEVICE_ADDRESS,
    "untyped_storage": lambda tensor, _: tensor.host.untyped_storage(),
    "is_pinned": lambda _tensor, _: False,
}


@contextmanager
def pretend_cuda(*, warp: bool = False) -> Generator[PretendCuda]:
    """Within the block, ``device="cuda"`` works and makes tensors of the pretend device.

    Args:
        warp: also let Warp take and give such tensors, running its kernels on the CPU.
    """
    _register_guard()
    pretend = PretendCuda()
    patches: list[Any] = [
        mock.patch.object(torch.cuda, "_lazy_init", return_value=None),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        # its random numbers are drawn by the generator of the host
        mock.patch.object(torch.cuda, "get_rng_state", return_value=torch.zeros(16, dtype=torch.uint8)),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "current_stream", pretend.current_stream),
        mock.patch.object(torch.cuda, "synchronize", pretend.synchronize),
        mock.patch.object(torch, "Generator", _Generator),
        *(_warp_patches(pretend) if warp else ()),
    ]
    before = torch._C._only_lift_cpu_tensors(), torch.__future__.get_overwrite_module_params_on_conversion()
    for patch in patches:
        patch.start()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) copies where we can see it
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to makes parameters of our class
    try:
        with _Functions(pretend), _Dispatch(pretend):
            yield pretend
    finally:
        torch._C._set_only_lift_cpu_tensors(before[0])
        torch.__future__.set_overwrite_module_params_on_conversion(before[1])
        for patch in reversed(patches):
            patch.stop()


_HostGenerator = torch.Generator


class _GeneratorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _HostGenerator)


class _Generator(metaclass=_GeneratorType):
    """``torch.Generator`` for any device: the random numbers are made on the CPU."""

    def __new__(cls, device: object = "cpu") -> Any:
        return _HostGenerator()


class _Stream:
    """A stream of torch, and of Warp."""

    def __init__(self, handle: object = 0) -> None:
        self.cuda_stream = handle


def _warp_patches(pretend: PretendCuda) -> list[Any]:
    import warp

    take, give, capture = warp.from_torch, warp.to_torch, warp.ScopedCapture
    cpu = warp.get_device("cpu")

    @contextmanager
    def scoped_stream(stream: _Stream, **_: object) -> Generator[_Stream]:
        before, pretend.warp_stream = pretend.warp_stream, stream
        try:
            with warp.ScopedDevice(cpu):
                yield stream
        finally:
            pretend.warp_stream = before

    @contextmanager
    def scoped_capture(stream: _Stream | None = None, **named: Any) -> Generator[Any]:
        assert stream is None or stream.cuda_stream != 0, "CUDA refuses to capture the default stream"
        assert stream is pretend.warp_stream, "captured on another stream than the one that is launched on"
        pretend.capturing = True
        try:
            with capture(**named) as made:
                yield made
        finally:
            pretend.capturing = False

    def counted(launch: Callable[..., Any], graph: bool = False) -> Callable[..., Any]:
        def run(*rest: Any, stream: _Stream | None = None, **named: Any) -> Any:
            kernel = rest[0] if rest else named.get("kernel")
            pretend.launch("graph" if graph else kernel.key, stream)
            return launch(*rest, **named)

        return run

    return [
        mock.patch.object(warp, "from_torch", lambda tensor, *rest, **named: take(_host(tensor), *rest, **named)),
        mock.patch.object(warp, "to_torch", lambda array, **named: PretendTensor(give(array, **named), pretend)),
        mock.patch.object(warp, "device_from_torch", return_value=cpu),
        mock.patch.object(warp, "stream_from_torch", lambda stream: stream),
        mock.patch.object(warp, "Stream", return_value=_Stream("its own")),
        mock.patch.object(warp, "ScopedStream", scoped_stream),
        mock.patch.object(warp, "ScopedCapture", scoped_capture),
        mock.patch.object(warp, "launch", counted(warp.launch)),
        mock.patch.object(warp, "launch_tiled", counted(warp.launch_tiled)),
        mock.patch.object(warp, "capture_launch", counted(warp.capture_launch, graph=True)),
    ]


def _register_guard() -> None:
    """Let C++ switch to a CUDA device. A build without CUDA has no guard for it; that of the CPU does nothing as well.

    It stays for the rest of the process: pretend tensors may outlive the block, and without a guard torch aborts.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[1] is None:
        guards[1] = guards[0]


def _refuse_mixed(name: str, arguments: Sequence[Any], plain: Iterable[torch.Tensor]) -> None:
    """Tensors of two devices, as far as a GPU refuses them: numbers (0-dim) may come from the host, indices, too."""
    plain = [tensor for tensor in plain if tensor.dim() > 0]
    if name in _INDEXING and isinstance(arguments[0], PretendTensor):
        indices = [index for index in arguments[1] if index is not None]
        plain = [tensor for tensor in plain if not any(tensor is index for index in indices)]
    if plain:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
        )


def _host(leaf: Any) -> Any:
    return tree_map(lambda part: part.host if isinstance(part, PretendTensor) else part, leaf)


def _with_index(value: Any) -> Any:
    """``cuda`` as ``cuda:0``: torch would ask a driver which one is meant."""
    if isinstance(value, str) and value == "cuda":
        return CUDA
    if isinstance(value, torch.device) and value.type == "cuda" and value.index is None:
        return CUDA
    return value


def _place() -> Place:
    frame, first = sys._getframe(1), None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(_ROOT)) and file != _HERE and "site-packages" not in file:
            place = f"{Path(file).relative_to(_ROOT)}:{frame.f_lineno}"
            if "/src/headrace/" in file:
                return place
            first = first or place
        frame = frame.f_back
    return first or "elsewhere"

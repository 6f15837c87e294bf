"""The papers' networks as graphs, with the costs of section 6.4: FLOPs, and activations of 4 bytes an element.

Layers are those a user writes (a convolution with its ReLU where the network has no normalisation between them), so
that VGG16 is a step of about 45 ops. A multiply-add is 2 FLOPs; an op that only moves or compares data counts 1 per
element it writes. The backward op of a convolution or dense layer costs the forward op once for the weights and, unless
it reads the data, once for the input. Resident are parameters, their gradients and the input (equation 2).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from recoup.generators.training import INPUT, Layer, training_graph
from recoup.graph import Graph

FLOAT = 4
Shape = tuple[int, ...]  # channels, height, width; or features


class Network:
    """Collects layers; each method adds one and returns its id."""

    def __init__(self, name: str, batch: int, shape: Shape) -> None:
        self.name, self.batch = name, batch
        self.shapes: dict[str, Shape] = {INPUT: shape}
        self.layers: list[Layer] = []
        self.parameters = 0

    def conv(
        self, x: str, out: int, kernel: int = 3, stride: int = 1, *, depthwise: bool = False, relu: bool = False
    ) -> str:
        """A convolution with 'same' padding, optionally with its ReLU; ``depthwise``: one filter a channel."""
        channels, height, width = self.shapes[x]
        shape = (out, -(-height // stride), -(-width // stride))
        weights = kernel * kernel * out * (1 if depthwise else channels)
        return self._linear("conv", x, shape, weights, weights + out, shape[1] * shape[2], relu)

    def deconv(self, x: str, out: int, kernel: int, stride: int) -> str:
        """A transposed convolution that makes the image ``stride`` times larger."""
        channels, height, width = self.shapes[x]
        weights = kernel * kernel * out * channels
        shape = (out, height * stride, width * stride)
        return self._linear("deconv", x, shape, weights, weights + out, height * width, False)

    def dense(self, x: str, out: int, *, relu: bool = False) -> str:
        """A fully connected layer over all features of ``x``."""
        weights = prod(self.shapes[x]) * out
        return self._linear("dense", x, (out,), weights, weights + out, 1, relu)

    def pool(self, x: str, size: int = 2, stride: int = 2) -> str:
        """Max pooling; backward compares input and output again."""
        channels, height, width = self.shapes[x]
        shape = (channels, -(-height // stride), -(-width // stride))
        return self._add("pool", (x,), shape, per_element=size * size, keeps_output=True)

    def average(self, x: str, size: int = 0) -> str:
        """Average pooling over ``size`` by ``size``, or over the whole image; backward needs only shapes."""
        channels, height, width = self.shapes[x]
        shape = (channels, height // size, width // size) if size else (channels,)
        window = prod(self.shapes[x]) // prod(shape)
        return self._add("average", (x,), shape, per_element=window, keeps_inputs=False)

    def norm(self, x: str) -> str:
        """Batch normalisation; backward reads the input."""
        self.parameters += 2 * self.shapes[x][0]
        return self._add("norm", (x,), self.shapes[x], per_element=4)

    def relu(self, x: str) -> str:
        """ReLU; backward reads the output."""
        return self._add("relu", (x,), self.shapes[x], keeps_inputs=False, keeps_output=True)

    def add(self, x: str, y: str) -> str:
        """An addition; its gradient is handed on as it is."""
        return self._add("add", (x, y), self.shapes[x], keeps_inputs=False, passes_gradient=True)

    def concat(self, *parts: str) -> str:
        """Concatenation along the channels; backward slices."""
        shape = (sum(self.shapes[p][0] for p in parts), *self.shapes[parts[0]][1:])
        return self._add("concat", parts, shape, keeps_inputs=False)

    def upsample(self, x: str) -> str:
        """Nearest-neighbour upsampling by two."""
        channels, height, width = self.shapes[x]
        return self._add("upsample", (x,), (channels, 2 * height, 2 * width), keeps_inputs=False)

    def conv_norm_relu(self, x: str, out: int, kernel: int = 3, stride: int = 1) -> str:
        """The usual three layers."""
        return self.relu(self.norm(self.conv(x, out, kernel, stride)))

    def graph(self) -> Graph:
        """The training step; the last layer added feeds the loss."""
        elements = prod(self.shapes[self.layers[-1].id]) * self.batch
        return training_graph(
            self.name,
            self.layers,
            input_bytes=prod(self.shapes[INPUT]) * self.batch * FLOAT,
            fixed_bytes=2 * self.parameters * FLOAT,
            loss_time=5 * elements,
            time_unit="flop",
        )

    def _linear(self, kind: str, x: str, shape: Shape, weights: int, parameters: int, uses: int, relu: bool) -> str:
        self.parameters += parameters
        flops = 2 * weights * uses * self.batch
        element = prod(shape) * self.batch
        sides = 1 if x == INPUT else 2
        return self._append(
            Layer(
                id=f"{kind}{len(self.layers) + 1}",
                inputs=(x,),
                bytes=element * FLOAT,
                time=flops + element * (2 if relu else 1),
                backward_time=sides * flops + element * (2 if relu else 1),
                keeps_output=relu,
                name=f"{kind}+relu" if relu else kind,
            ),
            shape,
        )

    def _add(
        self,
        kind: str,
        inputs: tuple[str, ...],
        shape: Shape,
        *,
        per_element: int = 1,
        keeps_inputs: bool = True,
        keeps_output: bool = False,
        passes_gradient: bool = False,
    ) -> str:
        element = prod(shape) * self.batch
        return self._append(
            Layer(
                id=f"{kind}{len(self.layers) + 1}",
                inputs=inputs,
                bytes=element * FLOAT,
                time=per_element * element,
                backward_time=per_element * element,
                keeps_inputs=keeps_inputs,
                keeps_output=keeps_output,
                passes_gradient=passes_gradient,
                name=kind,
            ),
            shape,
        )

    def _append(self, layer: Layer, shape: Shape) -> str:
        self.layers.append(layer)
        self.shapes[layer.id] = shape
        return layer.id


def _vgg(name: str, batch: int, repeats: tuple[int, ...]) -> Graph:
    net = Network(name, batch, (3, 224, 224))
    x = INPUT
    for channels, count in zip((64, 128, 256, 512, 512), repeats, strict=True):
        for _ in range(count):
            x = net.conv(x, channels, relu=True)
        x = net.pool(x)
    net.dense(net.dense(net.dense(x, 4096, relu=True), 4096, relu=True), 1000)
    return net.graph()


def vgg16(batch: int = 1) -> Graph:
    """VGG16 on 224 by 224 images."""
    return _vgg("vgg16", batch, (2, 2, 3, 3, 3))


def vgg19(batch: int = 1) -> Graph:
    """VGG19 on 224 by 224 images."""
    return _vgg("vgg19", batch, (2, 2, 4, 4, 4))


def mobilenet(batch: int = 1) -> Graph:
    """MobileNet v1 on 224 by 224 images."""
    net = Network("mobilenet", batch, (3, 224, 224))
    x = net.conv_norm_relu(INPUT, 32, stride=2)
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for channels, stride in plan:
        x = net.relu(net.norm(net.conv(x, net.shapes[x][0], 3, stride, depthwise=True)))
        x = net.conv_norm_relu(x, channels, 1)
    net.dense(net.average(x), 1000)
    return net.graph()


def resnet50(batch: int = 1) -> Graph:
    """ResNet-50 on 224 by 224 images."""
    net = Network("resnet50", batch, (3, 224, 224))
    x = net.pool(net.conv_norm_relu(INPUT, 64, 7, 2), 3, 2)
    for stage, (channels, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = net.conv_norm_relu(x, channels, 1)
            y = net.conv_norm_relu(y, channels, 3, stride)
            y = net.norm(net.conv(y, 4 * channels, 1))
            if not block:
                x = net.norm(net.conv(x, 4 * channels, 1, stride))
            x = net.relu(net.add(y, x))
    net.dense(net.average(x), 1000)
    return net.graph()


def densenet161(batch: int = 1) -> Graph:
    """DenseNet-161 on 224 by 224 images."""
    net = Network("densenet161", batch, (3, 224, 224))
    x = net.pool(net.conv_norm_relu(INPUT, 96, 7, 2), 3, 2)
    for stage, count in enumerate((6, 12, 36, 24)):
        for _ in range(count):
            y = net.conv(net.relu(net.norm(x)), 4 * 48, 1)
            y = net.conv(net.relu(net.norm(y)), 48, 3)
            x = net.concat(x, y)
        if stage < 3:
            x = net.conv(net.relu(net.norm(x)), net.shapes[x][0] // 2, 1)
            x = net.average(x, 2)
    net.dense(net.average(net.relu(net.norm(x))), 1000)
    return net.graph()


def unet(batch: int = 1) -> Graph:
    """U-Net on 416 by 608 images."""
    net = Network("unet", batch, (3, 416, 608))
    x, skips = INPUT, []
    for channels in (64, 128, 256, 512):
        x = net.conv(net.conv(x, channels, relu=True), channels, relu=True)
        skips.append(x)
        x = net.pool(x)
    x = net.conv(net.conv(x, 1024, relu=True), 1024, relu=True)
    for channels, skip in zip((512, 256, 128, 64), reversed(skips), strict=True):
        x = net.concat(skip, net.deconv(x, channels, 2, 2))
        x = net.conv(net.conv(x, channels, relu=True), channels, relu=True)
    net.conv(x, 21, 1)
    return net.graph()


def fcn8(batch: int = 1) -> Graph:
    """FCN-8s with VGG16 layers on 416 by 608 images."""
    net = Network("fcn8", batch, (3, 416, 608))
    x, pools = INPUT, []
    for channels, count in zip((64, 128, 256, 512, 512), (2, 2, 3, 3, 3), strict=True):
        for _ in range(count):
            x = net.conv(x, channels, relu=True)
        x = net.pool(x)
        pools.append(x)
    x = net.conv(net.conv(x, 4096, 7, relu=True), 4096, 1, relu=True)
    x = net.deconv(net.conv(x, 21, 1), 21, 4, 2)
    for skip in (pools[3], pools[2]):
        x = net.add(x, net.conv(skip, 21, 1))
        x = net.deconv(x, 21, 4, 2) if skip == pools[3] else net.deconv(x, 21, 16, 8)
    return net.graph()


def segnet(batch: int = 1) -> Graph:
    """SegNet on 416 by 608 images."""
    net = Network("segnet", batch, (3, 416, 608))
    x = INPUT
    for channels, count in zip((64, 128, 256, 512, 512), (2, 2, 3, 3, 3), strict=True):
        for _ in range(count):
            x = net.conv_norm_relu(x, channels)
        x = net.pool(x)
    for widths in ((512, 512, 512), (512, 512, 256), (256, 256, 128), (128, 64), (64,)):
        x = net.upsample(x)
        for channels in widths:
            x = net.conv_norm_relu(x, channels)
    net.conv(x, 21)
    return net.graph()


NETWORKS: dict[str, Callable[[int], Graph]] = {
    "vgg16": vgg16,
    "vgg19": vgg19,
    "mobilenet": mobilenet,
    "resnet50": resnet50,
    "densenet161": densenet161,
    "unet": unet,
    "fcn8": fcn8,
    "segnet": segnet,
}

"""A GPT-style training step at the level of ATen operators, with roofline times: as large as captured graphs are.

Unlike the papers' networks this one has what a framework's own graph has: matrix products split into their gradients,
normalisation statistics and attention's log-sum-exp as second outputs, parameter gradients that must stay to the end,
and workspaces. Bytes are those of 16-bit values; times are in microseconds on a device of 400 TFLOP/s and 3 TB/s.
"""

from __future__ import annotations

from recoup.builder import GraphBuilder
from recoup.graph import Graph, Phase

HALF = 2
FLOPS_PER_US = 400e6
BYTES_PER_US = 3e6
LAUNCH_US = 2.0


def transformer(layers: int = 24, width: int = 1024, tokens: int = 8192, vocabulary: int = 32768) -> Graph:
    """Forward, loss and backward of a decoder with ``layers`` blocks: 12 forward and 26 backward ops each."""
    return _Step(layers, width, tokens, vocabulary).build()


class _Step:
    def __init__(self, layers: int, width: int, tokens: int, vocabulary: int) -> None:
        self.layers, self.width, self.tokens, self.vocabulary = layers, width, tokens, vocabulary
        self.parameters = 12 * width * width * layers + vocabulary * width
        resident = 6 * self.parameters * HALF + tokens * 8
        self.b = GraphBuilder(f"transformer-{layers}", time_unit="us", resident_bytes=resident)
        self.x = self.b.input("tokens", tokens * 8)
        self.row = tokens * width * HALF  # one activation
        self.gradients: list[str] = []
        self.phase: Phase = "forward"

    def build(self) -> Graph:
        x = self.point("embed", [self.x], self.row)
        saved = []
        for layer in range(self.layers):
            x, kept = self.block(f"l{layer}", x)
            saved.append(kept)
        y, stats = self.norm("final", x)
        logits = self.product("head", y, self.width, self.vocabulary)
        loss_stats = self.point("lse", [logits], self.tokens * 4)
        self.phase = "backward"
        g = self.point("loss.backward", [logits, loss_stats], self.tokens * self.vocabulary * HALF)
        g = self.product_backward("head", y, g, self.width, self.vocabulary)
        g = self.norm_backward("final", x, stats, g)
        for layer in range(self.layers - 1, -1, -1):
            g = self.block_backward(f"l{layer}", saved[layer], g)
        self.weight_gradient("embed", [self.x, g], self.vocabulary * self.width)
        return self.b.build(outputs=self.gradients)

    def block(self, name: str, x: str) -> tuple[str, dict[str, str]]:
        k: dict[str, str] = {"x": x}
        k["n1"], k["s1"] = self.norm(f"{name}.n1", x)
        k["qkv"] = self.product(f"{name}.qkv", k["n1"], self.width, 3 * self.width)
        k["att"], k["lse"] = self.attention(f"{name}.attention", k["qkv"])
        o = self.product(f"{name}.out", k["att"], self.width, self.width)
        k["drop1"], k["mask1"] = self.dropout(f"{name}.drop1", o)
        k["r"] = self.point(f"{name}.add1", [x, k["drop1"]], self.row)
        k["n2"], k["s2"] = self.norm(f"{name}.n2", k["r"])
        k["up"] = self.product(f"{name}.up", k["n2"], self.width, 4 * self.width)
        k["act"] = self.point(f"{name}.gelu", [k["up"]], 4 * self.row)
        down = self.product(f"{name}.down", k["act"], 4 * self.width, self.width)
        drop, k["mask2"] = self.dropout(f"{name}.drop2", down)
        return self.point(f"{name}.add2", [k["r"], drop], self.row), k

    def block_backward(self, name: str, k: dict[str, str], g: str) -> str:
        d = self.point(f"{name}.drop2.backward", [g, k["mask2"]], self.row)
        d = self.product_backward(f"{name}.down", k["act"], d, 4 * self.width, self.width)
        d = self.point(f"{name}.gelu.backward", [k["up"], d], 4 * self.row)
        d = self.product_backward(f"{name}.up", k["n2"], d, self.width, 4 * self.width)
        d = self.norm_backward(f"{name}.n2", k["r"], k["s2"], d)
        r = self.point(f"{name}.add1.backward", [g, d], self.row)
        d = self.point(f"{name}.drop1.backward", [r, k["mask1"]], self.row)
        d = self.product_backward(f"{name}.out", k["att"], d, self.width, self.width)
        d = self.attention_backward(f"{name}.attention", k["qkv"], k["att"], k["lse"], d)
        d = self.product_backward(f"{name}.qkv", k["n1"], d, self.width, 3 * self.width)
        d = self.norm_backward(f"{name}.n1", k["x"], k["s1"], d)
        return self.point(f"{name}.add2.backward", [r, d], self.row)

    # Operators ---------------------------------------------------------------------------------------------------

    def point(self, name: str, inputs: list[str], size: int) -> str:
        """A pointwise op or a reduction: memory-bound."""
        return self.op(name, inputs, {f"v.{name}": size}, moved=size * (len(inputs) + 1))[0]

    def norm(self, name: str, x: str) -> tuple[str, str]:
        outputs = {f"v.{name}": self.row, f"s.{name}": 8 * self.tokens}
        y, stats = self.op(name, [x], outputs, moved=2 * self.row)
        return y, stats

    def norm_backward(self, name: str, x: str, stats: str, g: str) -> str:
        self.weight_gradient(f"{name}.weight", [x, stats, g], 2 * self.width)
        return self.point(f"{name}.backward", [x, stats, g], self.row)

    def dropout(self, name: str, x: str) -> tuple[str, str]:
        outputs = {f"v.{name}": self.row, f"m.{name}": self.row // HALF}
        y, mask = self.op(name, [x], outputs, moved=int(2.5 * self.row))
        return y, mask

    def attention(self, name: str, qkv: str) -> tuple[str, str]:
        outputs = {f"v.{name}": self.row, f"lse.{name}": 4 * self.tokens * 16}
        y, lse = self.op(name, [qkv], outputs, moved=4 * self.row, flops=2 * self.tokens * 1024 * self.width)
        return y, lse

    def attention_backward(self, name: str, qkv: str, out: str, lse: str, g: str) -> str:
        delta = self.point(f"{name}.delta", [out, g], 4 * self.tokens * 16)
        inputs, made = [qkv, lse, delta, g], {f"v.{name}.backward": 3 * self.row}
        flops = 5 * self.tokens * 1024 * self.width
        return self.op(f"{name}.backward", inputs, made, moved=8 * self.row, flops=flops, workspace=self.row)[0]

    def product(self, name: str, x: str, inner: int, outer: int) -> str:
        size = self.tokens * outer * HALF
        return self.op(name, [x], {f"v.{name}": size}, moved=size, flops=2 * self.tokens * inner * outer)[0]

    def product_backward(self, name: str, x: str, g: str, inner: int, outer: int) -> str:
        flops = 2 * self.tokens * inner * outer
        self.weight_gradient(f"{name}.weight", [x, g], inner * outer, flops)
        self.weight_gradient(f"{name}.bias", [g], outer)
        size = self.tokens * inner * HALF
        return self.op(f"{name}.backward", [g], {f"v.{name}.backward": size}, moved=size, flops=flops)[0]

    def weight_gradient(self, name: str, inputs: list[str], elements: int, flops: int = 0) -> None:
        """A parameter's gradient: it stays to the end."""
        size = elements * HALF
        outputs = {f"d.{name}": size}
        self.gradients += self.op(f"{name}.grad", inputs, outputs, moved=size + self.row, flops=flops)

    def op(
        self, name: str, inputs: list[str], outputs: dict[str, int], moved: int, flops: int = 0, workspace: int = 0
    ) -> tuple[str, ...]:
        time = LAUNCH_US + max(flops / FLOPS_PER_US, moved / BYTES_PER_US)
        return self.b.op(
            name,
            inputs=inputs,
            outputs=outputs,
            time=round(time, 3),
            workspace=workspace,
            phase=self.phase,
        )

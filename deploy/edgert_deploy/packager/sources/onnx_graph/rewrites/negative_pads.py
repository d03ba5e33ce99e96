"""Writes negative pads of a ConvTranspose as output_padding, because ONNX refuses negative pads.

tf2onnx writes -1 for a Conv2DTranspose with `padding="valid"` and `output_padding=1`.
"""

from __future__ import annotations

from typing import Any

from edgert_deploy.packager.sources.onnx_graph.nodes import attribute_of, nodes_of, refill


def state_output_padding(proto: Any) -> bool:
    """Replace the negative end pads of each ConvTranspose, in place; return whether there were any."""
    from onnx import helper

    found = False
    for node in nodes_of(proto.graph):
        pads = list(attribute_of(node, "pads", [])) if node.op_type == "ConvTranspose" else []
        ends = pads[len(pads) // 2 :]
        if min(ends, default=0) < 0:
            padding = attribute_of(node, "output_padding", [0] * len(ends))
            pads[len(ends) :] = [max(end, 0) for end in ends]
            padding = [one - min(end, 0) for one, end in zip(padding, ends, strict=True)]
            refill(node.attribute, [one for one in node.attribute if one.name not in ("pads", "output_padding")])
            node.attribute.append(helper.make_attribute("pads", pads))
            node.attribute.append(helper.make_attribute("output_padding", padding))
            found = True
    return found

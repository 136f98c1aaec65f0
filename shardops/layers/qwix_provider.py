"""A provider for Qwix: products of a Flax model done by shardops, chosen by Qwix's rules."""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardops.layers.drop_in import DotGeneral

try:
    qwix: Any = importlib.import_module("qwix")
except ImportError as error:
    raise ImportError(
        "shardops.layers.qwix_provider: qwix is not installed; expected qwix 0.1.8 or newer. "
        "pip install qwix."
    ) from error

__all__ = ["ShardopsProvider"]


class ShardopsProvider(qwix.QuantizationProvider):
    """Products of a model by shardops, without an edit of the model.

        model = qwix.quantize_model(model, ShardopsProvider([qwix.QuantizationRule()]), *inputs)

    A product in a module that a rule matches (`module_path`, `op_names` "dot_general" or "einsum")
    is done by `so.dot_general` or, with a recipe, in 8 bits as `shardops.layers.drop_in.DotGeneral`
    says. Formats and scales are the recipe's: of a rule its types are not read.

    Args:
      rules: as Qwix takes them; the first that matches counts. The others stay as they are.
      recipe: of `so.recipes`, one without state; None: products of the operands as they are.
    """

    def __init__(self, rules: Sequence[Any], recipe: Any = None, **options: Any) -> None:
        super().__init__(rules, **options)
        self._dot_general = DotGeneral(recipe)

    def get_intercept_map(self) -> dict[str, Any]:
        """What takes the place of JAX's functions while the model runs."""
        return {
            **super().get_intercept_map(),
            "jax.lax.dot_general": self.dot_general,
            "jax.numpy.einsum": self.einsum,
        }

    def dot_general(self, *args: Any, **kwargs: Any) -> jax.Array:
        """`jax.lax.dot_general`, by the rule of the module that calls it."""
        return self._of("dot_general")(*args, **kwargs)

    def einsum(self, *args: Any, **kwargs: Any) -> jax.Array:
        """`jax.numpy.einsum`, its products by the rule of the module that calls it."""
        return jnp.einsum(*args, **{"_dot_general": self._of("einsum"), **kwargs})

    def _of(self, op: str) -> Any:
        rule, _ = self._get_current_rule_and_op_id(op)
        return jax.lax.dot_general if rule is None else self._dot_general

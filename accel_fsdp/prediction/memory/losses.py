"""What head and loss of older libraries allocate of the size of the logits, in order. Pure.

transformers 5's are on the recorded tapes; these take their place where a run names older versions.
"""

from typing import NamedTuple


class Loss(NamedTuple):
    """Tensors that are allocated ("+") and freed ("-") in forward and backward, each with its bytes per logit.

    It begins with the model's own logits, "l", and ends with their gradient, "d".
    """

    forward: str
    backward: str
    bytes_per_logit: str

    @property
    def widths(self) -> dict[str, int]:
        """Bytes per logit of each tensor, such as {"l": 2, "f": 4}."""
        return {word[0]: int(word[1:]) for word in self.bytes_per_logit.split()}

    @property
    def peaks(self) -> tuple[int, int]:
        """Bytes per logit at the highest point of forward and of backward."""
        widths, alive, peaks = self.widths, self.widths["l"], []
        for words in (self.forward, self.backward):
            highest = 0
            for word in words.split():
                alive += widths[word[1]] if word[0] == "+" else -widths[word[1]]
                highest = max(highest, alive)
            peaks.append(highest)
        return peaks[0], peaks[1]


_LATE = "+n +g -p -n +z -g +d -z"
_WIDTHS = "l2 f4 s4 p4 n4 g4 z4 d2"
"""f: upcast copy; s: shifted copy; p: log-softmax; n, g: gradients of the loss and of log-softmax; z: unshifted."""
UPCAST = Loss("+f -l +s +p -s -f", _LATE, _WIDTHS)
"""transformers 4.45: the upcast takes the name of the logits, and shifting copies it."""
UPCAST_AND_KEPT = Loss("+f +s +p -s -f -l", _LATE, _WIDTHS)
"""transformers 4.48: the model's frame still holds the logits (`ForCausalLMLoss`)."""
FOAK_UPCAST = Loss("+f -l +s -f", "+z -s +d -z", "l2 f4 s4 z4 d2")
"""foak: no log-softmax, and the gradient takes the place of the logits that it is for."""
FOAK_UPCAST_AND_KEPT = Loss("+f +s -f -l", "+z -s +d -z", "l2 f4 s4 z4 d2")
FOAK = Loss("+f -l", "+d -f", "l2 f4 d2")
LOW = Loss("+s +p -s -l", "+n +g -p -n +d -g", "l2 s2 p2 n2 g2 d2")
"""gpt_bigcode, pure 16 bit: nothing is upcast."""
FOAK_LOW = Loss("+s -l", "+d -s", "l2 s2 d2")
"""foak with gpt_bigcode's own loss, by the token slopes of fms-acceleration's runs."""
FOAK_LOW_AUTOCAST = Loss("+s +f -s -l", "+z -f +d -z", "l2 s2 f4 z2 d2")
LOW_AUTOCAST = Loss("+s +f +p -s -f -l", "+n +g -p -n +z -g +d -z", "l2 s2 f4 p4 n4 g4 z2 d2")
"""gpt_bigcode under autocast, which makes a float32 copy and a float32 log-softmax."""

"""Short clauses that a licence may hold: the partners of joins."""

from __future__ import annotations

CLAUSES = (
    "Commercial use is allowed.",
    "Redistribution in source form is allowed.",
    "Redistribution in binary form is allowed.",
    "Changed files must carry a notice of the change.",
    "The copyright notice must be kept in all copies.",
    "The software comes without any warranty.",
    "The authors are not liable for damages.",
    "The names of the authors may not be used in advertising.",
    "Derived works must be under the same licence.",
    "A patent licence is granted.",
    "The licence ends if you sue over patents.",
    "The source code must be offered to users over a network.",
    "Documentation must name the authors.",
    "The licence ends if its conditions are broken.",
    "Selling the software on its own is forbidden.",
    "The software may be used for any purpose.",
    "The law of a particular country applies.",
    "Changed versions must have another name.",
    "A copy of the licence must be included.",
    "The software is in the public domain.",
)

"""The keywords that the checker enforces: the grammar leaves them to it, and refuses the others."""

from __future__ import annotations

KNOWN: frozenset[str] = frozenset(
    {
        *("not", "if", "then", "else", "oneOf"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
        *("minProperties", "maxProperties", "multipleOf", "patternProperties"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
"""Names of keywords of JSON schema. A name is added here when the checker enforces it wholly."""

"""Names the schema keywords that the checker enforces in place of the grammar."""

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
"""Names of JSON schema keywords. Add a name only when the checker enforces it completely."""

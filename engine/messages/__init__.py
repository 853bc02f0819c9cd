"""What crosses a border: msgspec Structs without behaviour. Fields are only ever appended."""

"""Messages between processes: msgspec Structs. New fields are only ever appended."""

"""Thirty grammars. Most are in a notation that lark itself reads; those in GBNF have a twin in
Lark's notation beside them, from which texts are derived and by which they are judged."""

from __future__ import annotations

LARK: dict[str, str] = {
    "sum": """
        start: term ("+" term)*
        term: /[0-9]{1,3}/ | "(" start ")"
    """,
    "arithmetic": """
        start: product (("+" | "-") product)*
        product: power (("*" | "/") power)*
        power: atom ("^" power)?
        atom: NUMBER | "-" atom | "(" start ")"
        NUMBER: /[0-9]{1,4}(\\.[0-9]{1,3})?/
    """,
    "arithmetic with spaces": """
        start: product (("+" | "-") product)*
        product: atom (("*" | "/") atom)*
        atom: NUMBER | "(" start ")"
        NUMBER: /[0-9]{1,4}/
        %ignore / {1,2}/
    """,
    "brackets": """
        start: pair*
        pair: "(" start ")" | "[" start "]" | "{" start "}"
    """,
    "a then b": """
        start: "a" start "b" | "ab"
    """,
    "palindrome": """
        start: "a" start "a" | "b" start "b" | "c" start "c" | "a" | "b" | "c" | "."
    """,
    "left recursion": """
        start: list "."
        list: list "," item | item
        item: /[a-z]{1,5}/
    """,
    "both recursions": """
        start: start "&" start | "!" start | /[pqr]/ | "(" start ")"
    """,
    "json": """
        start: value
        value: object | array | STRING | NUMBER | "true" | "false" | "null"
        object: "{" [pair ("," pair)*] "}"
        pair: STRING ":" value
        array: "[" [value ("," value)*] "]"
        STRING: /"[^"\\\\\\n]{0,20}"/
        NUMBER: /-?(0|[1-9][0-9]{0,8})(\\.[0-9]{1,4})?/
        %ignore /[ \\n]{1,3}/
    """,
    "lisp": """
        start: form
        form: "(" ATOM (" " (form | ATOM))* ")"
        ATOM: /[a-z+*<=-]{1,6}/ | /[0-9]{1,4}/
    """,
    "assignments": """
        start: line+
        line: NAME " = " value "\\n"
        value: NAME | INTEGER | value " + " value
        NAME: /[a-z]{1,6}/
        INTEGER: /[0-9]{1,5}/
    """,
    "function calls": """
        start: call
        call: NAME "(" [argument (", " argument)*] ")"
        argument: call | TEXT | INTEGER
        NAME: /[a-z_]{1,8}/
        TEXT: /'[a-z ]{0,12}'/
        INTEGER: /-?[0-9]{1,4}/
    """,
    "sql": """
        start: "SELECT " columns " FROM " NAME [" WHERE " condition] [" LIMIT " INTEGER] ";"
        columns: "*" | NAME (", " NAME)*
        condition: test ((" AND " | " OR ") test)*
        test: NAME COMPARED (INTEGER | TEXT)
        COMPARED: " = " | " < " | " >= " | " <> "
        NAME: /[a-z]{1,7}/
        INTEGER: /[0-9]{1,4}/
        TEXT: /'[A-Za-z ]{0,10}'/
    """,
    "logic": """
        start: implied
        implied: either (" -> " implied)?
        either: both (" or " both)*
        both: simple (" and " simple)*
        simple: "not " simple | /[A-D]/ | "(" implied ")"
    """,
    "list of words": """
        start: "[" words? "]"
        words: WORD ("; " WORD)*
        WORD: /[a-zäöü]{2,9}/
    """,
    "xml": """
        start: bold | item | TEXT
        bold: "<b>" start* "</b>"
        item: "<i>" start* "</i>" | "<br/>"
        TEXT: /[a-z ]{1,12}/
    """,
    "csv": """
        start: row ("\\n" row)*
        row: cell ("," cell)*
        cell: PLAIN | QUOTED
        PLAIN: /[A-Za-z0-9 ]{1,8}/
        QUOTED: /"[A-Za-z0-9 ,]{0,10}"/
    """,
    "key and value": """
        start: section+
        section: "[" NAME "]\\n" setting*
        setting: NAME "=" VALUE "\\n"
        NAME: /[a-z]{1,8}/
        VALUE: /[^\\n\\[\\]=]{1,16}/
    """,
    "chess": """
        start: move (" " move)*
        move: PIECE? SQUARE | "O-O" | "O-O-O"
        PIECE: /[KQRBN]/
        SQUARE: /[a-h][1-8]/
    """,
    "steps": """
        start: step step step answer
        step: "Step: " SENTENCE "\\n"
        answer: "Answer: " ("yes" | "no")
        SENTENCE: /[A-Za-z ,]{1,40}\\./
    """,
    "unicode": """
        start: greeting ("、" greeting)*
        greeting: "こんにちは" | "你好" | "Grüß Gott" | "🙂" NAME
        NAME: /[ж-я]{1,5}/
    """,
    "counts": """
        start: "<" digit~4 ">" | "{" digit~2..3 "}"
        digit: "0" | "1" | "2"
    """,
}

# The grammar as it is asked, and its twin.
GBNF: dict[str, tuple[str, str]] = {
    "gbnf sum": (
        'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"\n',
        'start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"\n',
    ),
    "gbnf list": (
        'root ::= item+\nitem ::= "- " [a-z ]+ "\\n"\n',
        'start: item+\nitem: "- " /[a-z ]+/ "\\n"\n',
    ),
    "gbnf answer": (
        'root ::= "{\\"answer\\": " (number | word) "}"\nnumber ::= "-"? [1-9] [0-9]*\n'
        'word ::= "\\"" [a-z]* "\\""\n',
        'start: "{\\"answer\\": " (number | word) "}"\nnumber: "-"? /[1-9]/ /[0-9]/*\n'
        'word: "\\"" /[a-z]/* "\\""\n',
    ),
    "gbnf brackets": (
        'root ::= "(" root* ")" | "[" root* "]"\n',
        'start: "(" start* ")" | "[" start* "]"\n',
    ),
    "gbnf optional": (
        'root ::= "a"? "b"? ("c" | "d") [^a-z\\n]?\n',
        'start: "a"? "b"? ("c" | "d") /[^a-z\\n]/?\n',
    ),
    "gbnf tic tac toe": (
        'root ::= row "\\n" row "\\n" row\nrow ::= cell "|" cell "|" cell\ncell ::= [XO ]\n',
        'start: row "\\n" row "\\n" row\nrow: cell "|" cell "|" cell\ncell: /[XO ]/\n',
    ),
    "gbnf moves": (
        'root ::= move (" " move){0,4}\nmove ::= [NBRQK]? [a-h] [1-8] ("+" | "#")?\n',
        'start: move (" " move)~0..4\nmove: /[NBRQK]/? /[a-h]/ /[1-8]/ ("+" | "#")?\n',
    ),
    "gbnf expression": (
        'root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= num | "(" expr ")"\n'
        "num ::= [0-9]{1,3}\n",
        'start: expr\nexpr: term (/[-+*\\/]/ term)*\nterm: num | "(" expr ")"\nnum: /[0-9]{1,3}/\n',
    ),
}

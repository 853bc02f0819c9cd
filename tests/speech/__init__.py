"""Answers of models and how they are to be read.

corpus     answers of each family, with the slips that models make, and what they mean
families   what chat templates, tokens and tools they are tried with
playing    an answer, token by token, through a reader or through an API
mutations  answers that nobody foresaw, from those of the corpus
"""

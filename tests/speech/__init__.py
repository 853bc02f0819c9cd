"""Answers of models and how they are to be read.

cases      the corpus by family
corpus     answers with the slips that models make, and what they mean
tagged     the same for families whose arguments stand between tags
families   what signs, tokens and tools they are tried with
playing    an answer, token by token, through a reader or through an API
apis       the three APIs: what is asked of each, and what its answers say
mutations  answers that nobody foresaw, from those of the corpus
"""

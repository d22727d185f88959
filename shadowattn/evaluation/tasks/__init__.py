"""Tasks: questions whose answer follows from the prompt, and only a model that still attends to the right places can say it.

Generated prompts come from seeds and words that training of the bundled model never used (`data.retrieval`). Plain prompts end
with a line to go on with; as a `chat` the document stands in the user's message, and the line begins the reply. One file a task.
"""

from shadowattn.evaluation.tasks.arxivsum import ArxivSum
from shadowattn.evaluation.tasks.base import Task
from shadowattn.evaluation.tasks.common_words import CommonWords
from shadowattn.evaluation.tasks.copy import Copy
from shadowattn.evaluation.tasks.droidcall import DroidCall
from shadowattn.evaluation.tasks.lost_in_the_middle import LostInTheMiddle
from shadowattn.evaluation.tasks.multi_document_qa import MultiDocumentQA
from shadowattn.evaluation.tasks.multihop import MultiHop
from shadowattn.evaluation.tasks.needle import Needle
from shadowattn.evaluation.tasks.octopus import Octopus
from shadowattn.evaluation.tasks.questions import Choice, ExactMatch, Question, Written, mean_change, mean_score, scores
from shadowattn.evaluation.tasks.retrieval_kv import RetrievalKV
from shadowattn.evaluation.tasks.text import Text

__all__ = [
    "ArxivSum",
    "Choice",
    "CommonWords",
    "Copy",
    "DroidCall",
    "ExactMatch",
    "LostInTheMiddle",
    "MultiDocumentQA",
    "MultiHop",
    "Needle",
    "Octopus",
    "Question",
    "RetrievalKV",
    "Task",
    "Text",
    "Written",
    "mean_change",
    "mean_score",
    "scores",
]

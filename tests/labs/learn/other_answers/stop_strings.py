"""Regular expressions: the shortest beginning of the text that ends with a stop string."""

import re


class Output:
    def __init__(self, stops):
        self.stops = stops
        self.text = ""
        self.num_shown = 0
        self.stop = None

    def append(self, token_text):
        self.text += token_text
        for end in range(1, len(self.text) + 1):
            for stop in sorted(self.stops, key=len, reverse=True):
                if re.search(re.escape(stop) + r"\Z", self.text[:end]):
                    self.stop = stop
                    return self.text[self.num_shown : end - len(stop)]
        held = max(i for stop in self.stops for i in range(len(stop)) if self.text.endswith(stop[:i]))
        shown = self.text[self.num_shown : len(self.text) - held]
        self.num_shown = len(self.text) - held
        return shown

    def finish(self):
        return self.text[self.num_shown :]

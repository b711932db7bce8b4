"""One character at a time: the held text is either a beginning of a stop string, or it gets shorter."""


class Output:
    def __init__(self, stops):
        self.stops = stops
        self.held = ""
        self.stop = None

    def append(self, token_text):
        shown = ""
        for character in token_text:
            self.held += character
            endings = [stop for stop in self.stops if self.held.endswith(stop)]
            if endings:
                self.stop = max(endings, key=len)
                return shown + self.held.removesuffix(self.stop)
            while self.held and not any(stop.startswith(self.held) for stop in self.stops):
                shown += self.held[0]
                self.held = self.held[1:]
        return shown

    def finish(self):
        return self.held
